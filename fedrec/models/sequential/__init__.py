# SPDX-License-Identifier: Apache-2.0
"""Models of what comes next in a user's sequence of items."""
