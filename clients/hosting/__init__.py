# SPDX-License-Identifier: Apache-2.0
"""A node: the clients it hosts, their model and private state, and how it trains them."""
