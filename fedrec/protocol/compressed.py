# SPDX-License-Identifier: Apache-2.0
"""The compressed updates of a node's clients as named arrays of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedrec.protocol.orders import SentUpdate

_OF = "#"


def updates_as_arrays(updates: Sequence[SentUpdate]) -> dict[str, np.ndarray]:
    """All arrays of what clients send, by the client's place, the parameter, and a name."""
    return {
        _OF.join((str(place), name, key)): array
        for place, one in enumerate(updates)
        for name, payload in one.payloads.items()
        for key, array in payload.items()
    }


def arrays_as_updates(
    arrays: Mapping[str, np.ndarray], shares: Sequence[float]
) -> list[SentUpdate]:
    """The inverse of `updates_as_arrays`, of untrusted input.

    Args:
        arrays: the arrays.
        shares: factor of each client's update.

    Raises:
        ValueError: an array is of no client.
    """
    found: list[dict[str, dict[str, np.ndarray]]] = [{} for _ in shares]
    for label, array in arrays.items():
        place, of_client = label.split(_OF, 1)
        name, key = of_client.rsplit(_OF, 1)
        if not place.isdecimal() or int(place) >= len(found):
            raise ValueError(f"an array of client {place!r} of {len(found)}")
        found[int(place)].setdefault(name, {})[key] = array
    return [SentUpdate(own, share) for own, share in zip(found, shares, strict=True)]
