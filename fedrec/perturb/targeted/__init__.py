# SPDX-License-Identifier: Apache-2.0
"""Perturbation of a client's data on its device, before anything is trained (poster "targeted DP",
equations 1 to 3).

`config` has the settings, `inclination` computes which items are typical of a group, `selection`
selects the protected interactions, `mechanisms` randomises them, `profiles` combines these steps,
and `guarantee` computes the privacy guarantee.
"""
