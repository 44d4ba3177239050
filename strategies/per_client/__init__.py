# SPDX-License-Identifier: Apache-2.0
"""Strategies that give each client parameters of its own, and take each client's answer by
itself."""
