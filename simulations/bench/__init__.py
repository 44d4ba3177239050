# SPDX-License-Identifier: Apache-2.0
"""FedRec-Bench: federated recommenders and their bars under one protocol, a cell at a time."""
