# SPDX-License-Identifier: Apache-2.0
"""Graphs of users and items that are distributed over devices: local attention, and the third party
that finds neighbours."""
