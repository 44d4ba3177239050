# SPDX-License-Identifier: Apache-2.0
"""Contracts of what changes the updates that clients send."""
