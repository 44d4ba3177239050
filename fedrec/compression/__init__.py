# SPDX-License-Identifier: Apache-2.0
"""Compression of clients' updates before they are sent."""
