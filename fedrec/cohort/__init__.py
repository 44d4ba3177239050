# SPDX-License-Identifier: Apache-2.0
"""Local training of many clients at once, at a cost that does not depend on the size of the catalogue.

Two ideas. *Sparse rows*: a client touches a few hundred rows of the item tables; these are gathered into a compact
table of its own, trained there, and the change is scattered back. *A leading cohort dimension*: parameters are `[C,
...]` and one batched product, gradient and update serves C clients. Clients are sorted by their number of steps and cut
into blocks, so that the active prefix of a block shrinks as clients finish, and padding is confined to the last batch
of an epoch.
"""
