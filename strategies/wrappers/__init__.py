# SPDX-License-Identifier: Apache-2.0
"""Strategies around any other strategy: differential privacy, two stages, a first round of
counts."""
