# SPDX-License-Identifier: Apache-2.0
"""The steps of a block, run sequentially; on a GPU recorded once and replayed.

A step of a small network is some hundred kernels of a few microseconds each, which a processor
takes longer to launch than the GPU to run. Steps of the same clients differ in their numbers alone,
so that one of them is recorded as a CUDA graph and the others are launched at once. Clients drop
out as they end, which would be another graph each time: a graph is of the smallest half, quarter
and so on of the block that holds those who still train, and leaves the others unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from fedrec.training.block import Block

_WORTH = 4  # steps; the first is run and the second is recorded, which takes as long

OneStep = Callable[[Block, int, int], Tensor]
"""Trains the first clients of a block in one of its steps: block, step and number of clients; their
losses, `[clients]`. Clients of whom `Block.training` is false must stay as they are."""


def run_steps(
    block: Block,
    one_step: OneStep,
    kind: Callable[[int], Hashable] = lambda _: None,
    capturable: bool = True,
) -> Tensor:
    """Train the clients of a block in all its steps.

    Args:
        block: the clients.
        one_step: what they do.
        kind: whatever a step depends on beside its numbers: steps of one kind launch the same
            kernels.
        capturable: whether a step may be recorded as a CUDA graph: it neither reads from the
            device nor copies to it, and its random numbers are in the block.

    Returns:
        `[S, C]`, their losses; arbitrary numbers where a client does not train.
    """
    device = block.touched.device
    losses = torch.zeros(len(block.active), len(block), device=device)
    recorder = recorder_of(device) if capturable else None
    if recorder is None:
        _run(block, one_step, losses, range(len(losses)))
        return losses
    with recorder.entered():
        for steps, clients in _alike(block, kind):
            if len(steps) < _WORTH:
                _run(block, one_step, losses, steps)
            else:
                _replay(recorder, block, one_step, losses, steps, clients)
    return losses


@functools.lru_cache
def recorder_of(device: torch.device) -> _CudaRecorder | None:
    """The recorder of a device, always the same; None if it has none."""
    return _CudaRecorder(device) if device.type == "cuda" else None


def _alike(block: Block, kind: Callable[[int], Hashable]) -> Iterator[tuple[range, int]]:
    """All steps of a block in their order, those together that differ in their numbers alone, with
    a number of clients that suffices for each."""

    def key(step: int) -> tuple[int, Hashable]:
        return _halved(len(block), block.active[step]), kind(step)

    for (clients, _), alike in groupby(range(len(block.active)), key):
        steps = list(alike)
        yield range(steps[0], steps[-1] + 1), clients


def _halved(clients: int, active: int) -> int:
    """A number of clients, halved as often as the active ones allow."""
    while clients > 1 and active <= clients // 2:
        clients //= 2
    return clients


def _run(block: Block, one_step: OneStep, losses: Tensor, steps: range) -> None:
    """Run some steps sequentially; `losses [S, C]` are written to."""
    for step in steps:
        active = block.active[step]
        losses[step, :active] = one_step(block, step, active)


def _replay(
    recorder: _CudaRecorder,
    block: Block,
    one_step: OneStep,
    losses: Tensor,
    steps: range,
    clients: int,
) -> None:
    """The same by one recording, of so many clients, for which the first step is run."""
    number = torch.full((1,), steps.start, device=losses.device)

    def work() -> None:
        """The step of this number, `int64 [1]`, which then is that of the following one."""
        measured = one_step(block.at(number, steps.start), 0, clients)
        losses[:, :clients].index_copy_(0, number, measured[None].to(losses.dtype))
        number.add_(1)

    work()
    recorded = recorder.record(work)
    for _ in steps[1:]:
        recorded.replay()


class _CudaRecorder:
    """CUDA graphs of one device, which are replayed in the order in which they were recorded, and
    so may share their memory.

    Attributes:
        stream: on which everything is run; CUDA does not record on the one that is the default.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None  # its memory would go with it

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The stream, which waits for the current one, and for which that waits at the end."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of work."""
        free, total = torch.cuda.mem_get_info(self.stream.device)
        if free < total / 2:  # what the process keeps for later cannot be given back meanwhile
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        memory = None if self._last is None else self._last.pool()
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        self._last = graph
        return graph
