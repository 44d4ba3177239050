# SPDX-License-Identifier: Apache-2.0
"""Item-item neighbourhood models: users' ratings, similarities between items, predictions,
gradients, posterior samples."""
