# SPDX-License-Identifier: Apache-2.0
"""Native code of matrix factorization: gradient descent by rating, denoising, packed matrices."""
