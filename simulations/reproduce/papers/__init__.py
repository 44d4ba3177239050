# SPDX-License-Identifier: Apache-2.0
"""Studies, one file for the tables or the figures of a paper."""
