# SPDX-License-Identifier: Apache-2.0
"""Reproduction of the papers' tables and figures: published and own numbers."""
