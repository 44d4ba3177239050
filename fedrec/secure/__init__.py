# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: fixed-point numbers, masks and shares, with which a server learns the sum
over nodes but no node's summand."""
