# SPDX-License-Identifier: Apache-2.0
"""Small, complete components; `fedrec new` replaces `Example` by your own name."""
