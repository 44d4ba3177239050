# SPDX-License-Identifier: Apache-2.0
"""Deployment: the same experiment with real clients, on Flower's SuperLink and SuperNodes."""
