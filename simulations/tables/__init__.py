# SPDX-License-Identifier: Apache-2.0
"""What is decided from a user's own table before a run."""
