# SPDX-License-Identifier: Apache-2.0
"""Self-supervised training of item embeddings on sessions (PrivRec, Wang et al. 2021, section 2.4).

A user's items in temporal order are cut into sessions. For each session, views are drawn in which
an item or a segment is replaced by a negative one; an encoder is trained to distinguish the true
item or segment from negatives. The encoder's parameters, whose names begin with `session.`, are
added to the recommender's; the item embedding is shared with it.
"""
