# SPDX-License-Identifier: Apache-2.0
"""Attacks on experiments: training of the needed federations, and the attacker's view of them."""
