# SPDX-License-Identifier: Apache-2.0
"""One small, complete component per kind; `fedrec new` puts a name of your own in the place of
`Example`."""
