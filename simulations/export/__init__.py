# SPDX-License-Identifier: Apache-2.0
"""Export of finished runs' models to files that score a user without fedrec."""
