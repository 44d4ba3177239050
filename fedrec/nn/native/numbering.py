# SPDX-License-Identifier: Apache-2.0
"""Numbers for the distinct items of many clients, in compiled code."""

from __future__ import annotations

import numpy as np

from fedrec.runtime.compilation import compiled

_PART = 64  # items that are looked at together: most parts of a large catalogue have none


@compiled
def number_items(references, real, ends, distinct, counts, numbers):
    """Number the distinct items that each of C clients refers to, in ascending order.

    Args:
        references: `int64 [N]`, items >= 0, one client after the other.
        real: `bool [N]`, which of them count.
        ends: `int64 [C]`, where the references of each client end.
        distinct: `int64 [N]`, written: the items of each client, one client after the other.
        counts: `int64 [C]`, written: how many each client has.
        numbers: `int64 [N]`, written: the place of each reference among the client's items; stays
            as it is where `real` is false.
    """
    size = 1
    for n in range(len(references)):
        if real[n]:
            size = max(size, references[n] + 1)
    found = np.zeros(-(-size // _PART) * _PART, np.bool_)
    parts = np.zeros(len(found) // _PART, np.bool_)
    places = np.empty(size, np.int64)
    used = 0
    start = 0
    for client in range(len(ends)):
        for n in range(start, ends[client]):
            if real[n]:
                found[references[n]] = True
                parts[references[n] // _PART] = True
        first = used
        for part in range(len(parts)):
            if not parts[part]:
                continue
            parts[part] = False
            for item in range(part * _PART, (part + 1) * _PART):
                if found[item]:
                    found[item] = False
                    distinct[used] = item
                    places[item] = used - first
                    used += 1
        counts[client] = used - first
        for n in range(start, ends[client]):
            if real[n]:
                numbers[n] = places[references[n]]
        start = ends[client]
