# SPDX-License-Identifier: Apache-2.0
"""Linear systems: matrix factorisation, EASE, PureSVD, iALS, BPR, WARP."""
