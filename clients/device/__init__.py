# SPDX-License-Identifier: Apache-2.0
"""A real node: its own users' rows, and its owner's policy."""
