# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: blocks of clients or one after the other, and the sum of their
updates."""
