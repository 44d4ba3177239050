# SPDX-License-Identifier: Apache-2.0
"""Balances a cohort's work between nodes that can train any of its clients. A round takes as long
as its slowest node. A node trains its clients in blocks, those with the most work first; the time
of a block grows with the steps of its longest client, with the work of all its clients, and with
their number. The constants are those of compiled code that takes all steps of a client at once,
where the first term is small.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 32  # clients that are trained together
_LEADS = 6  # number of ways of grouping long clients that are tried
# fixed cost of a client, in examples (measured on a CPU)
_CLIENT_COST = 40
# fixed cost of a step of a block, in units of the cost per client in it (measured on a CPU)
_STEP_COST = 0.1


def balanced(work: np.ndarray, nodes: int) -> list[np.ndarray]:
    """Places of the clients that each node trains, so that all nodes end at about the same time.

    Args:
        work: `[clients]`, each one's number of examples.
        nodes: number of nodes.

    Returns:
        `int64 [n]` places in `work`, ascending, one array per node; a function of the arguments
        alone.
    """
    order = np.argsort(-work, kind="stable").tolist()
    # With few blocks it can be faster to keep the long clients together, because the other blocks
    # then finish early.
    leads = _LEADS if len(order) <= nodes * _BLOCK else 1
    plans = [_shared_out(order, work.tolist(), nodes, lead) for lead in range(1, leads + 1)]
    _, shares = min(plans, key=lambda plan: plan[0])
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]


def _shared_out(
    order: list[int], work: list[float], nodes: int, lead: int
) -> tuple[float, list[list[int]]]:
    """The longest `lead` clients on the first node, each other client on the node that ends first;
    returned with the time of the slowest node."""
    shares: list[list[int]] = [[] for _ in range(nodes)]
    costs = [0.0] * nodes
    for rank, place in enumerate(order):
        ends = [
            cost
            + _CLIENT_COST
            + work[place] * (1 + (_STEP_COST if len(share) % _BLOCK == 0 else 0.0))
            for cost, share in zip(costs, shares, strict=True)
        ]
        node = 0 if rank < lead else ends.index(min(ends))
        costs[node] = ends[node]
        shares[node].append(place)
    return max(costs), shares
