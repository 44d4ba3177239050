# SPDX-License-Identifier: Apache-2.0
"""Membership attacks on experiments: train the federations that an attack needs, and hand it what
the attacker sees."""
