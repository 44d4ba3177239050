# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: training in blocks or client by client, and the sum of updates."""
