# SPDX-License-Identifier: Apache-2.0
"""Factorisations A = B C of the workload of a run, where A gives the parameters after each round
from the sums of all rounds: noise B z on what A gives is C^-1 z on the sums (Denisov et al. 2022).

All matrices are lower triangular and Toeplitz, and are given by their first columns.
"""
