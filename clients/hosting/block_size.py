# SPDX-License-Identifier: Apache-2.0
"""Number of clients that are trained at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedrec.cohort.batches import Batches

_ONE_BY_ONE = 32  # clients of a block in compiled code, which takes one after the other
# GiB of a block in compiled code, with all copies counted: 32 clients of PrivRec's network
_COMPILED_GIB = 3 / 32
_COPIES = 4  # copies of a client's parameters: values, gradients, momentum, and autograd's


def largest_block(device: torch.device, one_by_one: bool, together: int) -> int | None:
    """Largest number of clients per block; None: as many as fit the memory, for a GPU.

    Args:
        device: where clients are trained.
        one_by_one: whether compiled code processes one client after the other.
        together: clients whose numbers PyTorch's operations pass over at once on a processor, see
            `Step.block_clients`.
    """
    if device.type != "cpu":
        return None
    return _ONE_BY_ONE if one_by_one else together


def block_memory(device: torch.device, one_by_one: bool, memory_gib: float) -> float:
    """GiB that one block may take, of `memory_gib`; see `largest_block` for the others."""
    return min(memory_gib, _COMPILED_GIB) if device.type == "cpu" and one_by_one else memory_gib


def cut_blocks(
    batches: Sequence[Batches],
    parameters: Mapping[str, Tensor],
    item_tables: Sequence[str],
    *,
    memory_gib: float,
    largest: int | None,
) -> Iterator[list[int]]:
    """Sort clients by their number of steps, most first, and cut them into blocks of one width that
    fit the memory.

    Args:
        batches: the batches of each client.
        parameters: the global parameters.
        item_tables: names of those that become compact.
        memory_gib: GiB that one block may take.
        largest: clients per block at most; None: as many as fit the memory.

    Yields:
        Positions in `batches`, each once. A block has at least one client, even if it exceeds the
        memory.
    """
    width = [batch.items.shape[1] for batch in batches]
    order = sorted(
        range(len(batches)), key=lambda place: (-width[place], -len(batches[place].sizes), place)
    )
    budget = memory_gib * 2**30
    dense = sum(value.numel() for name, value in parameters.items() if name not in item_tables)
    widths = sum(parameters[name].shape[1] for name in item_tables)
    block: list[int] = []
    taken = 0.0
    for place in order:
        rows = batches[place].references()[0].size
        need = 4 * _COPIES * (dense + rows * widths) + 40 * rows
        if block and (
            len(block) == largest or taken + need > budget or width[place] != width[block[0]]
        ):
            yield block
            block = []
            taken = 0.0
        block.append(place)
        taken += need
    if block:
        yield block
