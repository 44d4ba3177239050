# SPDX-License-Identifier: Apache-2.0
"""User-level differential privacy: plan, clipping, noise, accounting, ledger, and explanations of
epsilon."""
