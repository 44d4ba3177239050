# SPDX-License-Identifier: Apache-2.0
"""Layers in compiled code, and the products and activations that they are made of."""
