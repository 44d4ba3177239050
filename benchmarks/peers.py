# SPDX-License-Identifier: Apache-2.0
"""Federated peers under leave-one-out, without and with the leak, beside systems without rounds.

    FEDREC_DATA=DATA python -m benchmarks.peers FOLDER --data ml-100k --seeds 3 --rounds 200
    python -m benchmarks.peers FOLDER --data ml-100k --table

Each system runs as shipped, in a run folder of its own, FOLDER/DATA/SYSTEM/seed-N (with the leak
FOLDER/DATA/SYSTEM-leak/seed-N), once ranked by all items and once among 99 drawn ones. What is
finished is not run again and what was broken off is resumed, so the study can be stopped at any
time; other rounds or another part need another FOLDER. Popularity, EASE and iALS draw no negatives,
so the leak is none to them. Beside each system with a seed stands the list that uses no model, by
how seldom an item was among the negatives that this very run drew (`never-drawn.json`). `--table`
prints what is there, means over seeds. Settings are chosen with `--part validation`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clients.hosting.node import Node
from fedrec.components.registry import SAMPLER, resolve
from fedrec.evaluation.lists import ranking_metrics
from fedrec.experiment.schema import Experiment
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from fedrec.runtime.atomic_files import write_atomically
from simulations import runner

SYSTEMS = ("fedmf", "fedncf", "pfedrec", "fedrap", "gpfedrec", "fedgnn")
CENTRAL = ("popularity", "ease", "ials")
METRICS = ("hits@10", "ndcg@10", "hits-of-100@10", "ndcg-of-100@10")
NEVER_DRAWN = "never-drawn.json"
LEAKS = {"both": (False, True), "without": (False,), "with": (True,)}

Rows = dict[tuple[str, bool], list[Mapping[str, float]]]
"""System and whether it leaks -> metrics, by seed."""


def central(data: str, seed: int, part: str) -> dict[str, object]:
    """An experiment of the systems without rounds alone."""
    return {
        "name": f"central-{data}",
        "seed": seed,
        "task": "ranking",
        "dataset": {"name": data},
        "split": {"name": "leave-one-out"},
        "evaluation": {
            "ks": [10],
            "sampled-items": 99,
            "held-out": part,
            "baselines": list(CENTRAL),
        },
        "engine": {"name": "serial", "threads": 1},
    }


def never_drawn(experiment: Experiment) -> dict[str, float]:
    """Metrics of ranking each user's items by how seldom they were negatives in this very run."""
    node = Node(experiment, 0, 1, None)
    step = node.step(experiment.step)
    population = node.population
    sampler = resolve(SAMPLER, experiment.sampler.name)(
        experiment.settings(SAMPLER), population.training_clients, experiment.seed
    )
    part = experiment.evaluation.held_out
    items = population.interactions.num_items
    clients = population.evaluated_clients(part)
    scores = np.zeros((population.interactions.num_users, items))
    for number in range(1, experiment.rounds + 1):
        for client in sampler.sample(number).tolist():
            random = stream(experiment.seed, "client", client, number)
            found = step.batches(population.client(client), random)
            real = np.arange(found.items.shape[1]) < found.sizes[:, None]
            negative = found.items[real & (found.labels == 0)]
            scores[client, np.unique(negative)] -= 1
    lists = population.held_out(clients, part)
    masks = {name: torch.from_numpy(getattr(lists, name)) for name in ("seen", "relevant")}
    own = torch.from_numpy(scores[clients])
    known = torch.from_numpy(lists.known)
    metrics = ranking_metrics(own, **masks, known=known, ks=(10,), sampled_items=99)
    return {name: float(np.nanmean(metrics[name])) for name in METRICS}


def wanted(given: argparse.Namespace) -> Iterator[tuple[Path, str | Mapping[str, Any], list[str]]]:
    """Folder, experiment and overrides of every run, those of the first seed first."""
    base = given.folder / given.data
    for seed in range(given.seeds):
        yield base / "central" / f"seed-{seed}", central(given.data, seed, given.part), []
        for leak in LEAKS[given.leak]:
            for system in given.only or SYSTEMS:
                overrides = [
                    f"seed={seed}",
                    f"split.leaky-negatives={str(leak).lower()}",
                    f"evaluation.held-out={given.part}",
                    "evaluation.baselines=[]",
                    "engine.threads=1",
                    *([f"rounds={given.rounds}"] if given.rounds else []),
                    *given.set,
                ]
                name = f"{system}-leak" if leak else system
                source = f"{system}-{given.data.replace('-', '')}"
                yield base / name / f"seed-{seed}", source, overrides


def finish(path: Path, source: str | Mapping[str, Any], overrides: list[str]) -> None:
    """Run the missing parts of one run: training, and the items that were never drawn."""
    if not (path / "result.json").is_file():
        if (path / "run.json").is_file():
            runner.resume(path)
        else:
            runner.run(source, overrides, output=path)
        for file in path.glob("private/*"):
            file.unlink()  # as large as the catalogue times the users; nothing resumes it
        print(f"{path} is finished", flush=True)
    if path.parent.name != "central" and not (path / NEVER_DRAWN).is_file():
        found = never_drawn(RunFolder(path).experiment)
        write_atomically(path / NEVER_DRAWN, json.dumps(found, indent=1).encode())


def results(base: Path) -> tuple[Rows, set[int]]:
    """What is there, and the numbers of rounds."""
    found = Rows()
    rounds = set[int]()
    for path in sorted(base.glob("*/seed-*")):
        if not (path / "result.json").is_file():
            continue
        result = RunFolder(path).read_result()
        name = path.parent.name
        if name == "central":
            for label, metrics in result.baselines.items():
                found.setdefault((label, False), []).append(metrics)
            continue
        system = name.removesuffix("-leak")
        leak = name.endswith("-leak")
        found.setdefault((system, leak), []).append(result.metrics)
        rounds.add(result.experiment.rounds)
        if (path / NEVER_DRAWN).is_file():
            told = json.loads((path / NEVER_DRAWN).read_text())
            found.setdefault((f"no model, draws of {system}", leak), []).append(told)
    return found, rounds


def table(found: Rows) -> list[str]:
    """Lines of Markdown, means over seeds; with more than one seed their standard deviation."""
    lines = [f"| system | seeds | {' | '.join(METRICS)} |", "|---" * (len(METRICS) + 2) + "|"]
    for leak in (False, True):
        names = [f"no model, draws of {system}" for system in SYSTEMS]
        for label in (*CENTRAL, *SYSTEMS, *names):
            if (label, leak) in found:
                lines.append(_line(f"{label} [leak]" if leak else label, found[label, leak]))
    return lines


def _line(label: str, seeds: Sequence[Mapping[str, float]]) -> str:
    cells = []
    for metric in METRICS:
        values = [one[metric] for one in seeds]
        spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        cells.append(f"{np.mean(values):.3f}{spread}")
    return f"| {label} | {len(seeds)} | {' | '.join(cells)} |"


def main() -> None:
    """Run the missing parts, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=("ml-100k", "ml-1m"), default="ml-100k")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=None, help="default: as shipped")
    parser.add_argument("--part", choices=("test", "validation"), default="test")
    parser.add_argument("--only", action="append", choices=SYSTEMS, default=[])
    parser.add_argument("--leak", choices=tuple(LEAKS), default="both")
    parser.add_argument("--set", action="append", default=[], help="an override of each system")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    given = parser.parse_args()
    if not given.table:
        for path, source, overrides in wanted(given):
            finish(path, source, overrides)
    found, rounds = results(given.folder / given.data)
    print("\n".join([*table(found), "", f"rounds: {', '.join(map(str, sorted(rounds)))}"]))


if __name__ == "__main__":
    main()
