# SPDX-License-Identifier: Apache-2.0
"""Accountants, one per file."""
