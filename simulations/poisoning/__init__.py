# SPDX-License-Identifier: Apache-2.0
"""Attacks of malicious clients on recommendations, for simulations (`[adversary]`)."""
