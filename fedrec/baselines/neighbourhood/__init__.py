# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood systems: KNN by items or users, Pearson and cosine predictors, PNBM."""
