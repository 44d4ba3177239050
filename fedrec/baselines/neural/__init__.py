# SPDX-License-Identifier: Apache-2.0
"""Neural systems, trained centrally."""
