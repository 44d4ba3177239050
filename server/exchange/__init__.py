# SPDX-License-Identifier: Apache-2.0
"""Requests to nodes, and checks of their replies."""
