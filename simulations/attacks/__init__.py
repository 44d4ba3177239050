# SPDX-License-Identifier: Apache-2.0
"""Attacks on experiments: train the federations that an attack needs, and pass it what the attacker
sees."""
