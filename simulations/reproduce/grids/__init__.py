# SPDX-License-Identifier: Apache-2.0
"""Grids of runs with tables of their own, beyond what the papers show; each is `python -m` its
name."""
