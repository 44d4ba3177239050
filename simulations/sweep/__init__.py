# SPDX-License-Identifier: Apache-2.0
"""Sweeps: one experiment in many settings and with many seeds, one run folder each."""
