# SPDX-License-Identifier: Apache-2.0
"""Random numbers of users and of their rows that no other user's data change.

Numbers that are drawn for all rows from one stream are others for everybody when one user has a row
more or less. These are hashes: of the seed, the user's name and, for a row, its position among the
user's own.
"""

from __future__ import annotations

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.rng import hashed, mixed, seed_sequence
from fedrec.runtime.grouping import within_groups

_SHIFT = np.uint64(32)  # the upper half of a hash is the number


def row_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 2^32) of each row, `int64 [rows]`.

    Args:
        interactions: the rows.
        seed: of the experiment.
        name: of the stream, see `fedrec.rng.stream`.
        address: of the stream.
    """
    position = np.empty(len(interactions), dtype=np.uint64)
    position[interactions.user_order] = within_groups(np.diff(interactions.user_offsets))
    users = _user_hashes(interactions, seed, name, *address)
    return (mixed(users[interactions.users] + position) >> _SHIFT).astype(np.int64)


def pair_numbers(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 2^32) of each row's user and item, `int64 [rows]`, whatever the order
    of the rows; arguments as of `row_numbers`."""
    users = _user_hashes(interactions, seed, name, *address)
    items = hashed(interactions.item_ids.tolist())
    numbers = mixed(users[interactions.users] + items[interactions.items])
    return (numbers >> _SHIFT).astype(np.int64)


def user_shares(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    """A random number in [0, 1) of each user, `float64 [users]`; arguments as of `row_numbers`."""
    return (_user_hashes(interactions, seed, name, *address) >> _SHIFT) / 2.0**32


def _user_hashes(interactions: Interactions, seed: int, name: str, *address: int) -> np.ndarray:
    salt = seed_sequence(seed, name, *address).generate_state(1, np.uint64)
    return mixed(hashed(interactions.user_ids.tolist()) ^ salt)
