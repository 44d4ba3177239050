# SPDX-License-Identifier: Apache-2.0
"""Models of finished runs as files that score a user without this library."""
