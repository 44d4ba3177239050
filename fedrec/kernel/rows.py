# SPDX-License-Identifier: Apache-2.0
"""Memory, rows, sums of clients' updates, and numbers of items in compiled code."""

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, INLINED, INNER, compiled

# Working memory of compiled code.

LINE = 16
"""Numbers in a cache line. Rounding of products depends on the alignment of their matrices, so all
are aligned to cache lines."""


@njit(**FAST)
def matrix(vector, start, rows, columns):
    """A part of a vector as `[rows, columns]`, in the same memory."""
    return vector[start : start + rows * columns].reshape(rows, columns)


@njit(**FAST)
def whole_lines(count):
    """The smallest multiple of a cache line that holds the given number of elements."""
    return -(-count // LINE) * LINE


@njit(**FAST)
def aligned(rows, columns):
    """Memory for `float32 [rows, columns]`, aligned to a cache line."""
    room = np.empty(rows * columns + LINE, np.float32)
    start = (-room.ctypes.data // 4) % LINE
    return room[start : start + rows * columns].reshape(rows, columns)


# Copies and sums of rows of numbers in compiled code.


@njit(**FAST)
def copy_row(row, target):
    """Copy a row; if it is short, an assignment takes several times as long."""
    for k in range(target.size):
        target[k] = row[k]


@njit(**FAST)
def repeat_row(row, targets):
    """Copy a row into each of several, `float32 [n, d]`."""
    for n in range(len(targets)):
        for k in range(row.size):
            targets[n, k] = row[k]


@njit(**FAST)
def add_row(row, total):
    """Add a row to another."""
    for k in range(total.size):
        total[k] += row[k]


@njit(**FAST)
def add_rows(rows, total):
    """Add rows `float32 [n, d]` to one."""
    for n in range(len(rows)):
        for k in range(total.size):
            total[k] += rows[n, k]


@njit(**INLINED)
def follow(rows, share, guide):
    """Move rows `[R, d]` a share of the way to others."""
    for r in range(len(guide)):
        for i in range(rows.shape[1]):
            rows[r, i] += share * (guide[r, i] - rows[r, i])


@njit(**INLINED)
def count_codes(codes):
    """Number of codes in a row that are not padding."""
    count = 0
    for code in codes:
        count += code >= 0
    return count


# Sums of clients' updates, and steps of rows, without large temporary arrays.

_SPAN = 512  # elements per block of the sum, which stays in the L1 cache over all clients


@njit(**INNER)
def _power(change, order):
    """A square (order 2) or a magnitude (1)."""
    return np.float64(change) ** 2 if order == 2 else np.float64(abs(change))


@compiled
def add_dense(totals, start, values, stride, shares):
    """Add, over the clients, share times (values - start) to the totals.

    Args:
        totals: `float64 [n]`.
        start: `float32 [n]`; `[0]`: zeros.
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
            client_values = values[client * stride + begin : client * stride + end]
            if share != 0 and start.size:
                for i in range(sums.size):
                    sums[i] += share * (np.float64(client_values[i]) - np.float64(before[i]))
            elif share != 0:
                for i in range(sums.size):
                    sums[i] += share * np.float64(client_values[i])


@compiled
def add_changed_rows(totals, slots, slot_rows, used, start, rows, firsts, counts, values, shares):
    """Add share times (row - its row of start) to a sum, for all clients and the rows that each
    changed.

    Args:
        totals: `float64 [slots, d]`; 0 in those that are not used yet.
        slots: `int64 [items]`, the slot of each item, -1 for none; an item without a slot gets the
            next one. `[0]`: items are slots.
        slot_rows: `int64 [slots]`, the item of each slot, written.
        used: number of slots that are used.
        start: `[items, d]`, as the values; `[0, d]`: zeros.
        rows: `int64 [n]`, items of the values.
        firsts: `int64 [C]`, where each client's first row is.
        counts: `int64 [C]`, number of rows of each client.
        values: `float32 [n, d]`, or `float64`.
        shares: `float64 [C]`; a client with share 0 adds nothing, even if its values are not
            finite.

    Returns:
        Number of used slots afterwards.
    """
    for client in range(len(shares)):
        share = shares[client]
        if share == 0:
            continue
        for entry in range(firsts[client], firsts[client] + counts[client]):
            item = rows[entry]
            slot = item
            if len(slots):
                if slots[item] < 0:
                    slots[item] = used
                    slot_rows[used] = item
                    used += 1
                slot = slots[item]
            total = totals[slot]
            after = values[entry]
            if len(start):
                before = start[item]
                for i in range(total.size):
                    total[i] += share * (np.float64(after[i]) - np.float64(before[i]))
            else:
                for i in range(total.size):
                    total[i] += share * np.float64(after[i])
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
        client_values = values[clients[pair]]
        amount = amounts[pair]
        for i in range(total.size):
            total[i] += amount * np.float64(client_values[i])


@compiled
def add_to_rows(table, rows, moves, factor):
    """Add factor times moves to rows of a table, sequentially.

    Args:
        table: `float32 [R, d]`.
        rows: `int64 [N]`.
        moves: `float32 [N, d]`.
        factor: `float32`.
    """
    for n in range(len(rows)):
        row = table[rows[n]]
        move = moves[n]
        for i in range(row.size):
            row[i] += factor * move[i]


@compiled
def powers(start, values, stride, clients, order):
    """Sums over n of squares (order 2) or magnitudes (1) of values - start, `float64 [C]`, of so
    many clients; see `add_dense`."""
    sums = np.zeros(clients)
    size = start.size if start.size else len(values) - (clients - 1) * stride
    for client in range(clients):
        after = values[client * stride : client * stride + size]
        total = 0.0
        if start.size:
            for i in range(size):
                total += _power(after[i] - start[i], order)
        else:
            for i in range(size):
                total += _power(after[i], order)
        sums[client] = total
    return sums


@compiled
def row_powers(start, rows, firsts, counts, values, order):
    """The same sums over the rows that clients changed, see `add_changed_rows`."""
    sums = np.zeros(len(counts))
    for client in range(len(counts)):
        total = 0.0
        for entry in range(firsts[client], firsts[client] + counts[client]):
            after = values[entry]
            if len(start):
                before = start[rows[entry]]
                for i in range(after.size):
                    total += _power(after[i] - before[i], order)
            else:
                for i in range(after.size):
                    total += _power(after[i], order)
        sums[client] = total
    return sums


# Numbers for the distinct items of many clients, in compiled code.

_PART = 64  # items that are looked at together: most parts of a large catalogue have none


@compiled
def number_items(references, ends):
    """Number the distinct items that each of C clients refers to, in ascending order.

    Args:
        references: `int64 [N]`, items >= 0, one client after the other.
        ends: `int64 [C]`, where the references of each client end.

    Returns:
        The items of each client, `int64 [C, R]`, padded with item 0; how many they are, `int64
        [C]`; and the place of each reference among its client's, `int64 [N]`.
    """
    size = 1
    for reference in references:
        size = max(size, reference + 1)
    present = np.zeros(-(-size // _PART) * _PART, np.bool_)
    parts = np.zeros(len(present) // _PART, np.bool_)
    positions = np.empty(size, np.int64)
    distinct = np.empty(len(references), np.int64)
    counts = np.zeros(len(ends), np.int64)
    numbers = np.empty(len(references), np.int64)
    used = 0
    start = 0
    for client in range(len(ends)):
        for item in references[start : ends[client]]:
            present[item] = True
            parts[item // _PART] = True
        first = used
        for part in range(len(parts)):
            if not parts[part]:
                continue
            parts[part] = False
            for item in range(part * _PART, (part + 1) * _PART):
                if present[item]:
                    present[item] = False
                    distinct[used] = item
                    positions[item] = used - first
                    used += 1
        counts[client] = used - first
        for n in range(start, ends[client]):
            numbers[n] = positions[references[n]]
        start = ends[client]
    most = 1
    for count in counts:
        most = max(most, count)
    table = np.zeros((len(ends), most), np.int64)
    used = 0
    for client in range(len(ends)):
        table[client, : counts[client]] = distinct[used : used + counts[client]]
        used += counts[client]
    return table, counts, numbers
