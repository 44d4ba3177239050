# SPDX-License-Identifier: Apache-2.0
"""Perturbation of a client's data on its device, before anything is trained (poster "targeted DP",
equations 1 to 3).

`config` says what is done, `inclination` which items tell a group, `selection` which interactions
are protected, `mechanisms` how one is, `profiles` puts them together, and `guarantee` says what it
is worth.
"""
