# SPDX-License-Identifier: Apache-2.0
"""Models with a private part on each client, which may include its own item embeddings."""
