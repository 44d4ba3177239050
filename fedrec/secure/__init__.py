# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: fixed point, masks and shares, with which a server learns a sum over nodes
and no node's part."""
