# SPDX-License-Identifier: Apache-2.0
"""Local training of many clients at once, over the few rows of the item tables that each of them
touches."""
