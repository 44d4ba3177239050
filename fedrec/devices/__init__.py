# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: how fast each client's device is, and when it is available."""
