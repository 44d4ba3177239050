# SPDX-License-Identifier: Apache-2.0
"""The share of a round that is not local training, with one node and with two.

    python benchmarks/overhead.py --cohort 100 --items 3706 --rounds 20 [--json OUT]

The work of `benchmarks/simulation.py` on the Ray engine, with a local step that measures each
node's training time: drawing batches, building blocks and training. A round takes at least the
training time of its slowest node; the rest is overhead, including all other work of the node.
Medians over all rounds except the first. The overhead of the server does not get smaller with more
nodes: if all of it is serial, however many nodes train, a round is at most round / overhead times
as fast as with one (Amdahl's law).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import child_environment  # noqa: E402
from benchmarks.round_ends import RoundEnds  # noqa: E402
from benchmarks.workload import experiment  # noqa: E402
from clients.steps.sgd import Sgd  # noqa: E402
from fedrec.data.client_data import ClientData  # noqa: E402
from fedrec.experiment.tables import EngineConfig  # noqa: E402
from fedrec.training.block import (  # noqa: E402
    Batches,
    Block,
    UserCodes,
)
from fedrec.training.results import Trained  # noqa: E402
from simulations.runner import run  # noqa: E402

NOTES = "FEDREC_OVERHEAD_NOTES"  # names the file that the nodes, processes of their own, write to


class TimedSgd(Sgd):
    """`sgd`, and a line per block in the file that the environment names: process, begin and
    seconds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # since the last line: to open the file for every client would be overhead of our own
        self._spent = 0.0

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work, from the same random draws as `update`."""
        with self._noted():
            return super().batches(data, random)

    def block(self, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Block:
        """Put clients together, see `Block.of`."""
        with self._noted():
            return super().block(users, batches, device)

    def train_in_kernel(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        client_params: Mapping[str, Tensor] | None = None,
    ) -> Trained:
        """The same as `train_block` in native code; asked for where `kernel_refusal` gives None."""
        begun = time.monotonic()
        with self._noted():
            trained = super().train_in_kernel(parameters, block, client_params)
        with open(os.environ[NOTES], "a") as file:
            file.write(f"{os.getpid()} {begun} {self._spent}\n")
        self._spent = 0.0
        return trained

    @contextmanager
    def _noted(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._spent += time.monotonic() - begun


# measured is what a built-in step gets: a plug-in's parameters are watched
TimedSgd.__module__ = Sgd.__module__


def measure(cohort: int, items: int, rounds: int, nodes: int) -> dict[str, float]:
    """Median seconds of a round and of its slowest node's training, and the share that is
    overhead."""
    work = experiment(cohort, items, rounds, "ray")
    engine = EngineConfig.parse({**work.engine.table(), "nodes": nodes}, at="engine")
    clock = RoundEnds()
    step = work.step.model_copy(update={"name": "benchmarks.overhead:TimedSgd"})
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        os.environ |= child_environment(**{NOTES: str(notes)})
        timed = work.model_copy(update={"step": step, "engine": engine})
        run(timed, output=Path(folder) / "run", callbacks=[clock])
        lines = [line.split() for line in notes.read_text().splitlines()]
    whole = []
    training = []
    for begin, end in clock.spans():
        by_node: dict[str, float] = defaultdict(float)
        for process, begun, seconds in lines:
            if begin <= float(begun) < end:
                by_node[process] += float(seconds)
        whole.append(end - begin)
        training.append(max(by_node.values()))
    shares = [1 - local / round_ for local, round_ in zip(training, whole, strict=True)]
    return {
        "round_seconds": statistics.median(whole),
        "training_seconds": statistics.median(training),
        "overhead": statistics.median(shares),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--items", type=int, default=3706)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    for nodes in (1, 2):
        found[nodes] = own = measure(given.cohort, given.items, given.rounds, nodes)
        overhead = own["round_seconds"] - own["training_seconds"]
        print(
            f"M={given.cohort}, {given.items:,} items, {nodes} nodes, {given.rounds - 1} rounds:"
            f" {own['round_seconds']:.3f} s a round, {own['training_seconds']:.3f} s of local"
            f" training on the slowest node, {own['overhead']:.1%} overhead;"
            f" {found[1]['round_seconds'] / own['round_seconds'] / nodes:.0%} of the speed of"
            f" {nodes} nodes without overhead, at most {found[1]['round_seconds'] / overhead:.0f}"
            " times one node's with any number"
        )
    if given.json:
        given.json.write_text(
            json.dumps({"cohort": given.cohort, "items": given.items, "nodes": found}) + "\n"
        )


if __name__ == "__main__":
    main()
