# SPDX-License-Identifier: Apache-2.0
"""A step of a shipped experiment on one node, one thread: users per second in training, and the
final evaluation.

Arguments: experiment, step, path, users per round, rounds, whether to evaluate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clients.evaluation import evaluate_clients
from clients.node import Node
from clients.round import train_clients
from fedrec.components.sections import Section
from fedrec.experiment.schema import load
from fedrec.protocol.messages import EvaluateOrder, TrainOrder
from fedrec.protocol.updates import dense_change

Numbers = dict[str, np.ndarray]


def node_of(name: str, path: str, *overrides: str) -> Node:
    """The only node of a shipped experiment, with a folder for private parameters."""
    torch.set_num_threads(1)
    experiment = load(name, [f"engine.path={path}", "engine.device=cpu", *overrides])
    return Node(experiment, 0, 1, Path(tempfile.mkdtemp()))


def section_of(node: Node, step: str) -> Section:
    """The settings of one of the experiment's steps, by name."""
    steps = node.experiment.steps().values()
    return next(section for section in steps if section.name == step)


def orders(node: Node, step: str, users: int, rounds: int, **changes: Any) -> list[TrainOrder]:
    """Training orders for a number of users, drawn in each round with the same seed for every
    contestant."""
    section = section_of(node, step)
    random = np.random.default_rng(0)
    settings = {"name": section.name, **section.options, **changes}
    drawn = (
        np.sort(random.choice(node.training, min(users, len(node.training)), replace=False))
        for _ in range(rounds)
    )
    return [
        TrainOrder(number, clients, step=settings) for number, clients in enumerate(drawn, start=1)
    ]


def trained(node: Node, arrays: Numbers, order: TrainOrder) -> tuple[float, Numbers]:
    """Seconds of one round's training, and the sums of updates."""
    begun = time.perf_counter()
    reply = train_clients(node, arrays, order)
    return time.perf_counter() - begun, {
        n: dense_change(change) for n, change in reply.total.items()
    }


def evaluated(node: Node, arrays: Numbers) -> float:
    """Seconds of the evaluation at the end of a run: all test users, without and with
    fine-tuning."""
    order = EvaluateOrder(1, None)
    shared = EvaluateOrder(
        1,
        None,
        step={"name": node.experiment.step.name, **node.experiment.step.options, "epochs": 0},
    )
    begun = time.perf_counter()
    for evaluation in (shared, order):
        evaluate_clients(node, arrays, evaluation)
    return time.perf_counter() - begun


def initial(node: Node) -> Numbers:
    """The parameters that the first round starts from."""
    return {name: value.numpy() for name, value in node.initial().items()}


def apart(sums: Numbers, wanted: Numbers) -> float:
    """The L2 norm of the difference over the norm, all parameters together."""
    moved = sum(float(np.square(value.astype(np.float64)).sum()) for value in wanted.values())
    off = sum(float(np.square(sums[n].astype(np.float64) - v).sum()) for n, v in wanted.items())
    return (off / moved) ** 0.5 if moved else 0.0


def peak_mib() -> float:
    """Largest memory of this process; `ru_maxrss` would be that of the process that started it, if
    larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10


def stepped(
    name: str, step: str, path: str, users: int, rounds: int, evaluation: bool
) -> dict[str, Any]:
    """Some rounds of one step on one node: seconds of each but the first, and memory."""
    node = node_of(name, path)
    arrays = initial(node)
    seconds = [trained(node, arrays, order)[0] for order in orders(node, step, users, rounds + 1)]
    report = {
        "users": min(users, len(node.training)),
        "seconds": seconds[1:],
        "path": str(node.path(node.step(section_of(node, step)))),
    }
    if evaluation:
        report["evaluation"] = evaluated(node, arrays)
    return {**report, "peak_mib": peak_mib()}


def main(arguments: list[str]) -> None:
    """Print what was measured as JSON."""
    name, step, path, users, rounds, evaluation = arguments
    print(json.dumps(stepped(name, step, path, int(users), int(rounds), evaluation == "True")))


if __name__ == "__main__":
    main(sys.argv[1:])
