# SPDX-License-Identifier: Apache-2.0
"""Centralised systems with differential privacy."""
