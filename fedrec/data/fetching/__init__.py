# SPDX-License-Identifier: Apache-2.0
"""Obtaining public datasets: download, or import of a local copy."""
