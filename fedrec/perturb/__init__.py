# SPDX-License-Identifier: Apache-2.0
"""Perturbations of training rows; `fedrec.data.perturbation` is their interface.

`members/` has a file for each perturbation; other folders contain the parts of the larger ones:
`targeted/` (poster "targeted DP", equations 1 to 3), `synthesis/` (UPC-SDG and its neighbours).
`disclosure` measures what a perturbed table reveals of the real one.
"""
