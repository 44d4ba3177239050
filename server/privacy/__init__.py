# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of a run: round guard, phases, personal budgets, secure sums."""
