# SPDX-License-Identifier: Apache-2.0
"""Experiments: TOML tables, their reading, overriding and resolution, and training phases."""
