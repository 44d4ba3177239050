# SPDX-License-Identifier: Apache-2.0
"""Layers with a leading cohort dimension, and how a model declares itself to the native kernel."""
