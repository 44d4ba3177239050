# SPDX-License-Identifier: Apache-2.0
"""Attacks on trained systems, as statistics on an attacker's observations.

Inference of membership and attributes, and whether a run leaks more than its epsilon allows
(`audit`). Everything here works on arrays; `simulations.attacks` trains the federations that the
arrays come from. `docs/attacks.md` explains what each of them
measures and what it does not.
"""
