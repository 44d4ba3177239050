# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: a small package with one component, its experiment, its contract test and a README.

The components in `templates` are complete and work as they are; docs/plugins.md shows the same
ones.
"""
