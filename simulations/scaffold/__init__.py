# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: a module with one component, and its contract test.

The components in `templates` are complete and work as they are; docs/plugins.md shows the same
ones.
"""
