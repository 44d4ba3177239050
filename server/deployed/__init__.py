# SPDX-License-Identifier: Apache-2.0
"""The server over real nodes: grid, discovery, validation of replies."""
