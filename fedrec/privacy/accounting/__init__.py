# SPDX-License-Identifier: Apache-2.0
"""What a sequence of noisy releases costs: events, accountants, calibration."""
