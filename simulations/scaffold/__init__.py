# SPDX-License-Identifier: Apache-2.0
"""Templates for `fedrec new`: a module with one component, and its contract test. The components in
`templates` are complete and also shown in docs/plugins.md.
"""
