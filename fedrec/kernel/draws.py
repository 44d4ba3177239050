# SPDX-License-Identifier: Apache-2.0
"""Draws of many clients in compiled code: numpy's streams of random numbers, negatives, shuffles.

Numbers are those of `numpy.random.Generator(PCG64)` with the same seed: seeds are hashed as by
`SeedSequence` (O'Neill 2015), bounded integers are Lemire's (2019) from halves of 64 bits, and
orders are Fisher and Yates' from masked ones. Python would take some 10 us to make the generator of
one client.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fedrec.kernel.compiled import INNER, compiled

_MULTIPLIER = 47026247687942121848144207491837523525  # of PCG64
_POOL = 4  # words of a SeedSequence
_U32 = np.uint32
_TABLE = 16  # as of `fedrec.data.client_data.draw_negatives`


@intrinsic
def _next64(_, states, client):
    """The next 64 bits of a client's stream, of states `uint64 [C, 6]`, changed in place: the
    state's high and low half, the increment's, half of a number, and whether there is one."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        wide = ir.IntType(128)
        words = ir.IntType(64)

        def address(word):
            at = [args[1], context.get_constant(types.intp, word)]
            return cgutils.get_item_pointer(context, builder, signature.args[0], array, at)

        def joined(word):
            high, low = (builder.zext(builder.load(address(word + n)), wide) for n in range(2))
            return builder.or_(builder.shl(high, ir.Constant(wide, 64)), low)

        moved = builder.mul(joined(0), ir.Constant(wide, _MULTIPLIER))
        moved = builder.add(moved, joined(2))
        high = builder.trunc(builder.lshr(moved, ir.Constant(wide, 64)), words)
        low = builder.trunc(moved, words)
        builder.store(high, address(0))
        builder.store(low, address(1))
        # XSL-RR: both halves folded, and rotated by the six highest bits
        folded = builder.xor(high, low)
        turn = builder.lshr(high, ir.Constant(words, 58))
        back = builder.and_(builder.sub(ir.Constant(words, 64), turn), ir.Constant(words, 63))
        return builder.or_(builder.lshr(folded, turn), builder.shl(folded, back))

    return types.uint64(states, types.intp), codegen


@njit(**INNER)
def _next32(states, client):
    """The next 32 bits: the lower half of a number first."""
    if states[client, 5]:
        states[client, 5] = 0
        return states[client, 4]
    number = _next64(states, client)  # pyright: ignore[reportCallIssue]
    states[client, 4] = number >> np.uint64(32)
    states[client, 5] = 1
    return number & np.uint64(0xFFFFFFFF)


@njit(**INNER)
def _below(states, client, count):
    """A number in [0, count), for a count below 2^32; of one number nothing is drawn."""
    bound = np.uint64(count)
    if bound <= 1:
        return 0
    product = _next32(states, client) * bound
    rest = product & np.uint64(0xFFFFFFFF)
    if rest < bound:
        threshold = (np.uint64(0x100000000) - bound) % bound
        while rest < threshold:
            product = _next32(states, client) * bound
            rest = product & np.uint64(0xFFFFFFFF)
    return np.int64(product >> np.uint64(32))


@njit(**INNER)
def _mixed(value, constant, multiplier):
    """A word of a SeedSequence, hashed, and the constant of the next one."""
    value = _U32(value ^ constant)
    constant = _U32(constant * multiplier)
    value = _U32(value * constant)
    return _U32(value ^ (value >> _U32(16))), constant


@njit(**INNER)
def _joined(first, second):
    result = _U32(_U32(_U32(0xCA01F9DD) * first) - _U32(_U32(0x4973F715) * second))
    return _U32(result ^ (result >> _U32(16)))


@compiled
def seeded(words, position, clients):
    """The states of many streams, `uint64 [C, 6]`, see `_next64`: those of PCG64 from the
    SeedSequence of the words.

    Args:
        words: `uint32 [n]`, at least 4.
        position: of the two words, the lower one first, that are the client's.
        clients: `int64 [C]`, >= 0.
    """
    states = np.zeros((len(clients), 6), np.uint64)
    words = words.copy()
    pool = np.empty(_POOL, np.uint32)
    for c in range(len(clients)):
        words[position] = _U32(clients[c] & 0xFFFFFFFF)
        words[position + 1] = _U32(clients[c] >> 32)
        constant = _U32(0x43B0D7E5)
        multiplier = _U32(0x931E8875)
        for i in range(_POOL):
            pool[i], constant = _mixed(words[i], constant, multiplier)
        for i in range(_POOL):
            for j in range(_POOL):
                if i != j:
                    value, constant = _mixed(pool[i], constant, multiplier)
                    pool[j] = _joined(pool[j], value)
        for i in range(_POOL, len(words)):
            for j in range(_POOL):
                value, constant = _mixed(words[i], constant, multiplier)
                pool[j] = _joined(pool[j], value)
        constant = _U32(0x8B51F9DD)
        drawn = np.zeros(4, np.uint64)
        for i in range(8):
            value, constant = _mixed(pool[i % _POOL], constant, _U32(0x58F38DED))
            drawn[i // 2] |= np.uint64(value) << np.uint64(32 * (i % 2))
        states[c, 2] = (drawn[2] << np.uint64(1)) | (drawn[3] >> np.uint64(63))
        states[c, 3] = (drawn[3] << np.uint64(1)) | np.uint64(1)
        _next64(states, c)  # pyright: ignore[reportCallIssue]
        low = states[c, 1] + drawn[1]
        states[c, 0] += drawn[0] + np.uint64(low < drawn[1])
        states[c, 1] = low
        _next64(states, c)  # pyright: ignore[reportCallIssue]
    return states


@njit(**INNER)
def _free_items(avoided, num_items, free):
    """Write the items that are not avoided, ascending; returns how many they are."""
    present = np.zeros(num_items, np.bool_)
    for item in avoided:
        present[item] = True
    count = 0
    for item in range(num_items):
        free[count] = item
        count += not present[item]
    return count


@njit(**INNER)
def _free_before(avoided):
    """Number of items before each of the distinct avoided ones that are not avoided."""
    ordered = np.sort(avoided)
    count = 0
    for n in range(len(ordered)):
        if n == 0 or ordered[n] != ordered[n - 1]:
            ordered[count] = ordered[n]
            count += 1
    return ordered[:count] - np.arange(count)


@njit(**INNER)
def _draw_negatives(states, client, avoided, num_items, drawn):
    """Write items outside the avoided ones, as `fedrec.data.client_data.draw_negatives` does."""
    if num_items > _TABLE * len(drawn):
        before = _free_before(avoided)
        count = num_items - len(before)
        for n in range(len(drawn)):
            rank = _below(states, client, count)
            drawn[n] = rank + np.searchsorted(before, rank, side="right")
    else:
        free = np.empty(num_items, np.int64)
        count = _free_items(avoided, num_items, free)
        for n in range(len(drawn)):
            drawn[n] = free[_below(states, client, count)]


@njit(**INNER)
def _shuffle(states, client, order):
    """Shuffle numbers as `Generator.shuffle` does: places are masked bits, those beyond the end are
    drawn again."""
    mask = np.uint64(1)
    while mask < len(order):
        mask = (mask << np.uint64(1)) | np.uint64(1)
    for n in range(len(order) - 1, 0, -1):
        while mask >> np.uint64(1) >= np.uint64(n):
            mask >>= np.uint64(1)
        other = _next32(states, client) & mask
        while other > np.uint64(n):
            other = _next32(states, client) & mask
        moved = order[n]
        order[n] = order[other]
        order[other] = moved


@compiled
def draw(states, clients, rows, avoided, num_items, negatives, epochs, shuffled, pools, orders):
    """Draw the examples of C clients and their order in each epoch.

    Args:
        states: `uint64 [C, 6]`, changed in place.
        clients: `int64 [C]`, positions in what follows.
        rows: offsets `int64 [clients + 1]`, items and labels of rows, ragged.
        avoided: offsets and items that are no negatives, ragged; they may repeat.
        num_items: of the catalogue.
        negatives: `int64 [clients]`, how many a client draws.
        epochs: how many.
        shuffled: whether each epoch is.
        pools: items `int64 [P]` and labels `float32 [P]`, written: the rows of each client and then
            its negatives.
        orders: `int32 [Q]`, written: for each epoch of a client the places of its examples in the
            client's pool.
    """
    offsets, items, labels = rows
    pool_items, pool_labels = pools
    begin = 0
    at = 0
    for c in range(len(clients)):
        client = clients[c]
        first = offsets[client]
        count = offsets[client + 1] - first
        size = count + negatives[client]
        known = avoided[1][avoided[0][client] : avoided[0][client + 1]]
        if epochs:
            for n in range(count):
                pool_items[begin + n] = items[first + n]
                pool_labels[begin + n] = labels[first + n]
            drawn = pool_items[begin + count : begin + size]
            if negatives[client]:
                _draw_negatives(states, c, known, num_items, drawn)
                pool_labels[begin + count : begin + size] = 0
            begin += size
        for _ in range(epochs):
            order = orders[at : at + size]
            at += size
            for n in range(size):
                order[n] = n
            if shuffled:
                _shuffle(states, c, order)


@compiled
def lay_out(orders, pools, sizes, epochs, width, batches):
    """Put the examples of C clients into batches, step by step.

    Args:
        orders: see `draw`.
        pools: items, labels and the number of each item among those of its client, `[P]` each.
        sizes: `int64 [C]`, examples in an epoch.
        epochs: how many.
        width: how far apart the first rows of two clients are.
        batches: items, rows `int64 [S, C, B]`, labels `float32 [S, C, B]` and sizes `int64 [S, C]`,
            0 before; written.
    """
    pool_items, pool_labels, numbers = pools
    items, rows, labels, counts = batches
    most = items.shape[2]
    pool = 0
    at = 0
    for c in range(len(sizes)):
        first = c * width
        step = 0
        for _ in range(epochs):
            for begin in range(0, sizes[c], most):
                count = min(most, sizes[c] - begin)
                counts[step, c] = count
                for n in range(count):
                    source = pool + orders[at + n]
                    items[step, c, n] = pool_items[source]
                    rows[step, c, n] = first + numbers[source]
                    labels[step, c, n] = pool_labels[source]
                rows[step, c, count:] = first
                at += count
                step += 1
        rows[step:, c, :] = first
        pool += sizes[c]
