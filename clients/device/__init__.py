# SPDX-License-Identifier: Apache-2.0
"""A real node: the data of its users, and its owner's policy."""
