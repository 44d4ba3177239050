# SPDX-License-Identifier: Apache-2.0
"""A deployment some of whose nodes are late or dead: whether rounds close by their deadline, and
what the ranking loses.

    python -m benchmarks.late_nodes --nodes 40 --late 0.2 --rounds 12 --deadline 90

Half of those nodes are late: their replies leave after one and a half deadlines. The others die
after the first round, unannounced: all their processes are suspended, so that nobody is told.
Printed are the rounds, and the metric of the final parameters for all users, beside those of
undisturbed runs with several seeds. The latter are simulations, which give the same numbers as a
deployment (a test compares them).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pandas as pd
import tomli_w

from benchmarks.deployment import deployed, deployed_run, experiment, load_of, memory
from benchmarks.soak import calm, of_everyone, rounds_of, say
from fedrec.runs.result import Result
from simulations.deployment.layout import Deployment


def main() -> None:
    """Run all, print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--late", type=float, default=0.2, help="share that is late or dead")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=40, help="clients of a round")
    parser.add_argument("--over-selection", type=float, default=1.25)
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds")
    parser.add_argument("--calm-seeds", type=int, default=5, help="undisturbed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of nodes")
    parser.add_argument("--port", type=int, default=25443)
    given = parser.parse_args()
    table = _experiment(given.nodes, given.rounds, given.cohort, given.deadline)
    closing = {"deadline": given.deadline, "over-selection": given.over_selection}
    few = {**table["evaluation"], "final-users": 8}  # those of all users are computed afterwards
    disturbed = {**table, "closing": closing, "evaluation": few}
    late, dead = chosen(given.nodes, given.late, given.seed)

    def slow(deployment: Deployment) -> None:
        delay(deployment, late, 1.5 * given.deadline)

    with deployed(disturbed, given.nodes, given.port, 1500, slow) as (deployment, seconds):
        say("up", seconds=seconds, late=late, dead=dead, **memory(deployment), **load_of())
        with dying(deployment, dead):
            found = deployed_run(deployment, disturbed)
        say("run", **closed_rounds(found, given.deadline), **memory(deployment), **load_of())
        say("run, for all users", **rounds_of(of_everyone(found, table)))
    for seed in range(given.calm_seeds):
        say("undisturbed", seed=seed, **rounds_of(calm(table, given.nodes, seed)))


def chosen(nodes: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the nodes that are late, and of those that die."""
    numbers = random.Random(seed).sample(range(1, nodes + 1), round(share * nodes))
    half = len(numbers) // 2
    return sorted(numbers[:half]), sorted(numbers[half:])


def delay(deployment: Deployment, numbers: Sequence[int], seconds: float) -> None:
    """Let the replies of some nodes leave so many seconds after their message arrived."""
    for number in numbers:
        with (deployment.node(number) / "node.toml").open("a") as file:
            file.write(tomli_w.dumps({"reply-interval": seconds}))


@contextmanager
def dying(deployment: Deployment, numbers: Sequence[int]) -> Iterator[None]:
    """Suspend all processes of some nodes once a round is reported, until the end."""
    ends = threading.Event()
    thread = threading.Thread(target=_suspend_later, args=(deployment, numbers, ends), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        _signal(deployment, numbers, signal.SIGCONT)


def closed_rounds(result: Result, deadline: float) -> dict[str, object]:
    """What the rounds of a run took, and what they did without."""
    seconds = pd.read_csv(result.folder / "timings.csv")["train"]
    return {
        **rounds_of(result),
        "clients in each round": result.rounds["num-clients"].tolist(),
        "replies missing in each round": result.rounds["dropped-replies"].tolist(),
        "deadline": deadline,
        "seconds of each round": [round(one, 1) for one in seconds],
    }


def _experiment(nodes: int, rounds: int, cohort: int, deadline: float) -> dict:
    table = experiment(nodes, rounds)
    table["strategy"] = {"name": "reptile", "server-lr": 3.0}  # so that few rounds show in ranking
    table["sampler"]["cohort"] = cohort
    # of all but training, in which late nodes answer
    table["engine"] |= {"max-failures": 1.0, "timeout": 2 * deadline}
    del table["evaluation"]["final-users"]
    return table


def _suspend_later(deployment: Deployment, numbers: Sequence[int], ends: threading.Event) -> None:
    reported = deployment.path / "runs" / "measured" / "rounds.csv"
    while not ends.wait(0.2):
        if reported.exists() and len(reported.read_text().splitlines()) > 1:
            _signal(deployment, numbers, signal.SIGSTOP)
            return


def _signal(deployment: Deployment, numbers: Sequence[int], kind: signal.Signals) -> None:
    running = json.loads((deployment.logs / "nodes" / "processes.json").read_text())["processes"]
    names = {f"node-{number}" for number in numbers}
    for name, process in running.items():
        if name.partition("/")[0] in names:
            with suppress(ProcessLookupError):
                os.kill(process["pid"], kind)


if __name__ == "__main__":
    main()
