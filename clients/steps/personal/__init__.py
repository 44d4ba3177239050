# SPDX-License-Identifier: Apache-2.0
"""Steps that fit something to each user: factors, a score function, an adaptation."""
