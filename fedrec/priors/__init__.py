# SPDX-License-Identifier: Apache-2.0
"""Priors of users' codes, computed from their metadata (Fang et al. 2022, section 3.3.1)."""
