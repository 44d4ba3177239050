# SPDX-License-Identifier: Apache-2.0
"""Sums of clients' updates, and steps of rows, in compiled code without large temporary tensors."""

import numpy as np

from fedrec.kernel.compiled import compiled

_SPAN = 512  # elements per block of the sum, which stays in the L1 cache over all clients


@compiled
def add_dense(totals, start, values, stride, shares):
    """Add, over the clients, share times (values - start) to the totals.

    Args:
        totals: `float64 [n]`.
        start: `float32 [n]`.
        values: those of a client after those of the one before, `float32 [(C - 1) * stride + n]`;
            of rows that lie apart Numba does not know that their numbers are side by side.
        stride: how far apart the first numbers of clients are.
        shares: `float64 [C]`; a client with share 0 adds nothing, even if its values are not
            finite.
    """
    for begin in range(0, totals.size, _SPAN):
        end = min(begin + _SPAN, totals.size)
        sums = totals[begin:end]
        before = start[begin:end]
        for client in range(len(shares)):
            share = shares[client]
            own = values[client * stride + begin : client * stride + end]
            if share != 0:
                for i in range(sums.size):
                    sums[i] += share * (np.float64(own[i]) - np.float64(before[i]))


@compiled
def add_rows(totals, slots, rows, used, start, touched, counts, values, shares):
    """Add share times (row - its row of start) to a sum, for all clients and the rows that each
    touched.

    Args:
        totals: `float64 [slots, d]`; 0 in those that are not used yet.
        slots: `int64 [items]`, the slot of each item, -1 for none; an item without a slot gets the
            next one.
        rows: `int64 [slots]`, the item of each slot, written.
        used: number of slots that are used.
        start: `float32 [items, d]`.
        touched: `int64 [C, R]`, items of the rows.
        counts: `int64 [C]`, number of rows of each client; later ones are padding.
        values: `float32 [C, R, d]`.
        shares: `float64 [C]`; a client with share 0 adds nothing, even if its values are not
            finite.

    Returns:
        Number of used slots afterwards.
    """
    for client in range(len(shares)):
        share = shares[client]
        if share == 0:
            continue
        for place in range(counts[client]):
            item = touched[client, place]
            if slots[item] < 0:
                slots[item] = used
                rows[used] = item
                used += 1
            total = totals[slots[item]]
            before = start[item]
            own = values[client, place]
            for i in range(total.size):
                total[i] += share * (np.float64(own[i]) - np.float64(before[i]))
    return used


@compiled
def add_shares(totals, slots, clients, amounts, values):
    """Add an amount of a client's numbers to a sum, for each of some pairs of sum and client.

    Args:
        totals: `float64 [N, d]`, changed in place.
        slots: `int64 [P]`, in `[0, N)`.
        clients: `int64 [P]`.
        amounts: `float64 [P]`.
        values: `float32 [C, d]`.
    """
    for pair in range(len(slots)):
        total = totals[slots[pair]]
        own = values[clients[pair]]
        amount = amounts[pair]
        for i in range(total.size):
            total[i] += amount * np.float64(own[i])


@compiled
def add_to_rows(table, places, moves, factor):
    """Add factor times moves to rows of a table, one after the other.

    Args:
        table: `float32 [R, d]`.
        places: `int64 [N]`.
        moves: `float32 [N, d]`.
        factor: `float32`.
    """
    for place in range(len(places)):
        own = table[places[place]]
        move = moves[place]
        for i in range(own.size):
            own[i] += factor * move[i]


@compiled
def powers(start, values, stride, clients, order):
    """Sums over n of squares (order 2) or magnitudes (1) of values - start, `float64 [C]`, of so
    many clients; see `add_dense`."""
    found = np.zeros(clients)
    for client in range(clients):
        own = values[client * stride : client * stride + start.size]
        total = 0.0
        if order == 2:
            for i in range(start.size):
                total += np.float64(own[i] - start[i]) ** 2
        else:
            for i in range(start.size):
                total += abs(np.float64(own[i] - start[i]))
        found[client] = total
    return found
