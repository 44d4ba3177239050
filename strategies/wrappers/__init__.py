# SPDX-License-Identifier: Apache-2.0
"""Strategies that wrap another strategy: two stages, or a first round of counts or means."""
