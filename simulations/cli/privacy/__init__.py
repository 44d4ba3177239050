# SPDX-License-Identifier: Apache-2.0
"""Commands that account for privacy."""
