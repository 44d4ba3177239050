# SPDX-License-Identifier: Apache-2.0
"""Graphs of users and items that are divided among devices: attention over a local part, and the
third party that finds neighbours."""
