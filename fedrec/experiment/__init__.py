# SPDX-License-Identifier: Apache-2.0
"""An experiment: its TOML tables, how they are read, overridden and resolved, and its training
phases."""
