# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization in one place: gradient descent rating by rating."""
