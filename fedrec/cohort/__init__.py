# SPDX-License-Identifier: Apache-2.0
"""Local training of many clients at once, on the rows of the item tables that their batches use."""
