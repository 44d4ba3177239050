# SPDX-License-Identifier: Apache-2.0
"""Datasets from the product reviews of Amazon."""
