# SPDX-License-Identifier: Apache-2.0
"""Strategies that withstand some malicious clients: robust means of the clients' updates."""
