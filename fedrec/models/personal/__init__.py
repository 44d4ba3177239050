# SPDX-License-Identifier: Apache-2.0
"""Models of which each client keeps a part of its own, down to item embeddings of its own."""
