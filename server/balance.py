# SPDX-License-Identifier: Apache-2.0
"""Sharing a cohort's work between nodes that could train any of its clients.

A round ends when its slowest node ends. A node trains its clients in blocks, those with the most work first; a block
takes as long as its longest client has steps, plus something for every client in it.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 16  # clients that are trained together
_STEP_COST = 1.0  # what a step of a block costs by itself, in units of what each client in it adds (measured on a CPU)


def balanced(work: np.ndarray, nodes: int) -> list[np.ndarray]:
    """Places of the clients that each node trains, so that all nodes end at about the same time.

    Args:
        work: `[clients]`, each one's number of examples.
        nodes: number of nodes.

    Returns:
        `int64` places in `work`, ascending, one array per node; a function of the arguments alone.
    """
    shares: list[list[int]] = [[] for _ in range(nodes)]
    costs = np.zeros(nodes)
    for place in np.argsort(-work, kind="stable").tolist():
        opens = np.array([_STEP_COST if len(share) % _BLOCK == 0 else 0.0 for share in shares])
        node = int(np.argmin(costs + work[place] * (1 + opens)))
        costs[node] += work[place] * (1 + opens[node])
        shares[node].append(place)
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]
