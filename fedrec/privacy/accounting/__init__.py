# SPDX-License-Identifier: Apache-2.0
"""Accounting of noisy releases: events, accountants, calibration."""
