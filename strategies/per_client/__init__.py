# SPDX-License-Identifier: Apache-2.0
"""Strategies that generate parameters for each client and need each client's reply separately."""
