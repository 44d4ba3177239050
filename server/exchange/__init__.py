# SPDX-License-Identifier: Apache-2.0
"""What the server asks nodes, and how it reads their replies."""
