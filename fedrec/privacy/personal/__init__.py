# SPDX-License-Identifier: Apache-2.0
"""Noise that each user adds on the device: settings, budgets and reports."""
