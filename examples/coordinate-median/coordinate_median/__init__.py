# SPDX-License-Identifier: Apache-2.0
"""A robust aggregator as a plug-in: the coordinate-wise median over clients."""
