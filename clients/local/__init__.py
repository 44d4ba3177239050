# SPDX-License-Identifier: Apache-2.0
"""Shared code of local steps: examples, descent, histories, per-example gradients, a user's own
noise."""
