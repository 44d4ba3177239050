# SPDX-License-Identifier: Apache-2.0
"""One small, complete component per kind; `fedrec new` replaces `Example` by your own name."""
