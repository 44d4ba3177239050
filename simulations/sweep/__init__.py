# SPDX-License-Identifier: Apache-2.0
"""Sweeps: one experiment with many settings and seeds, with one run folder per run."""
