# SPDX-License-Identifier: Apache-2.0
"""What training rows are turned into before anything learns from them; `fedrec.data.perturbation`
is the contract.

`members/` has a file for each perturbation, the folders beside it what the larger ones consist of:
`targeted/` (poster "targeted DP", equations 1 to 3), `synthesis/` (UPC-SDG and its neighbours).
`disclosure` says what a perturbed table still tells of the real one.
"""
