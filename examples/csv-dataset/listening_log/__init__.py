# SPDX-License-Identifier: Apache-2.0
"""A dataset from a CSV as a plug-in."""
