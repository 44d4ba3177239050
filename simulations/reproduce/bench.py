# SPDX-License-Identifier: Apache-2.0
"""FedRec-Bench: the numbers of a system on a dataset under a protocol (`papers/bench.toml`), and a
probe for leaks of held-out items through the negatives of training. The probe needs no model: it
ranks a user's items by how rarely the run drew them as negatives on the user's device. If held-out
items are excluded from the negatives, this ranking finds them. Without the leak, all candidates
were drawn equally often, and the ranking is at chance level.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from clients.node import Node
from clients.step import Step
from fedrec.components.registry import SAMPLER
from fedrec.components.sections import component_of
from fedrec.data.population import POPULATIONS
from fedrec.evaluation.tables import group_gaps, ranking_metrics
from fedrec.experiment.schema import TRIED, Experiment, marked, read
from fedrec.report.comparison import epsilon_of
from fedrec.rng import stream
from fedrec.runs.folder import Result
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import SYSTEM, finished, values

K = 10
DISCOUNTED = f"discounted-hits@{K}"
SAMPLED = 99  # sampled items against which a held-out one is ranked, in expectation over all draws
AMONG_SAMPLED = f"hits-of-100@{K}"
METRICS = (
    *(f"hits@{K}", DISCOUNTED, AMONG_SAMPLED, f"ndcg-of-100@{K}"),
    *(f"coverage@{K}", f"gini@{K}"),
)
PROBE = f"probe {AMONG_SAMPLED}"
CHANCE = K / (SAMPLED + 1)
_OF_SYSTEM = (
    *("rounds", "model", "step", "strategy", "sampler", "privacy", "secure-aggregation"),
    "perturb",
)
"""Sections set by a system; the protocol sets all others."""
_CELLS_AT_ONCE = 4_000_000  # users times items


def cell(
    job: TaskJob,
    dataset: str,
    table: Mapping[str, Any],
    protocol: str,
    split: Mapping[str, Any],
    row: str,
    tried: int,
    experiment: str = "",
    label: str = SYSTEM,
    set: Sequence[str] = (),
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Found]:
    """Compute quality, spread, gaps between groups, traffic, epsilon and probe of one seed of a
    system.

    Args:
        job: job of the task.
        dataset: name in tables.
        table: the dataset with its settings.
        protocol: name of the protocol.
        split: its split with settings.
        row: name of the system in tables.
        tried: number of settings compared on validation rows.
        experiment: name of the system's shipped experiment; empty: a baseline.
        label: label of the baseline.
        set: overrides of the experiment.
        chosen: further overrides by protocol.
    """
    overrides = [*set, *(chosen or {}).get(protocol, ())]
    result = finished(job, _protocol_table(table, split, experiment, label, overrides, tried))
    yield from values(result, dataset, {label: row}, {name: name for name in METRICS})
    for name, value in _further(result, label).items():
        yield Found(dataset, row, name, value, lower_is_better=True)
    chance = np.array([CHANCE])  # centralised systems draw no negatives here
    if label == SYSTEM:
        chance = never_drawn(result.experiment)[AMONG_SAMPLED]
    half = 1.96 * float(np.nanstd(chance)) / math.sqrt(len(chance))
    mean = float(np.nanmean(chance))
    yield Found(dataset, row, PROBE, mean, mean - half, mean + half)
    for file in job.run_path.glob("private/*"):  # may be large: catalogue times users
        file.unlink()


def _protocol_table(
    dataset: Mapping[str, Any],
    split: Mapping[str, Any],
    experiment: str,
    label: str,
    overrides: Sequence[str],
    tried: int,
) -> dict[str, Any]:
    """Experiment of a system under a protocol, which replaces dataset, split and evaluation of the
    system's experiment; all rows are positive. For the arguments see `cell`."""
    system = read(experiment) if experiment else {}
    evaluation: dict[str, Any] = {"baselines": [] if experiment else [label]}
    if tuned := system.get("evaluation", {}).get("fine-tune"):
        evaluation["fine-tune"] = tuned
    start = {**_only(system, _OF_SYSTEM), "split": dict(split), "evaluation": evaluation}
    table = read(start, overrides)
    baselines = table["evaluation"]["baselines"]
    if not experiment:
        (baseline,) = baselines
        named = {"name": baseline} if isinstance(baseline, str) else baseline
        baselines = [{**named, TRIED: tried}]
    return {
        **_only(table, _OF_SYSTEM),
        **({TRIED: tried} if experiment else {}),
        "name": "bench",
        "task": "ranking",
        "dataset": dict(dataset),
        "split": {**_only(table["split"], ("generalisation",)), **split},
        "evaluation": {
            **_only(table["evaluation"], ("fine-tune",)),
            "baselines": baselines,
            "every": 0,
            "ks": [K],
            "sampled-items": SAMPLED,
            "held-out": "test",
        },
        "engine": {"threads": 1},
    }


def _only(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: table[key] for key in keys if key in table}


def _further(result: Result, label: str) -> dict[str, float]:
    """Further numbers of a system: gaps between groups of users; epsilon if finite; mean bytes of a
    training client, if federated."""
    groups = result.groups if label == SYSTEM else result.baseline_groups[label]
    gaps = group_gaps(groups)[DISCOUNTED].dropna().to_dict()
    numbers = {f"gap of {DISCOUNTED}, {kind}": float(gap) for kind, gap in gaps.items()}
    epsilon = epsilon_of(result, marked(result.experiment) if label == SYSTEM else label)
    if epsilon is not None and math.isfinite(epsilon):
        numbers["epsilon"] = epsilon
    if label == SYSTEM:
        clients = len(POPULATIONS.population(result.experiment).training_clients)
        for way in ("up", "down"):
            numbers[f"bytes {way}"] = round(
                float(result.rounds[f"bytes-{way}"].to_numpy().sum()) / clients
            )
    return numbers


def never_drawn(experiment: Experiment) -> dict[str, np.ndarray]:
    """Metrics of ranking each held-out user's items by how rarely they were negatives, in training
    and in on-device fine-tuning.

    Args:
        experiment: the resolved experiment of the run.

    Returns:
        `float64 [users]` by metric; chance level for a user without drawn negatives.
    """
    node = Node(experiment, 0, 1, None)
    population = node.population
    settings = experiment.evaluation
    clients = population.evaluated_clients(settings.held_out)
    rounds = _rounds_of(experiment, population.training_clients)
    size = max(1, _CELLS_AT_ONCE // population.interactions.num_items)
    blocks: list[dict[str, np.ndarray]] = []
    for start in range(0, len(clients), size):
        users = clients[start : start + size]
        scores = np.zeros((len(users), population.interactions.num_items), dtype=np.float32)
        for index, client in enumerate(users.tolist()):
            for items in _draws(node, client, rounds.get(client, ())):
                scores[index, items] -= 1
        lists = population.held_out(users, settings.held_out)
        ranked = ranking_metrics(
            torch.from_numpy(scores),
            ks=settings.ks,
            sampled_items=settings.sampled_items,
            **{n: torch.from_numpy(getattr(lists, n)) for n in ("seen", "relevant", "known")},
        )
        blocks.append(ranked)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _rounds_of(experiment: Experiment, training: np.ndarray) -> dict[int, list[int]]:
    """Rounds of each client that took part."""
    sampler = component_of(SAMPLER, experiment.sampler, training, experiment.seed)
    rounds: dict[int, list[int]] = {}
    for number in range(1, experiment.rounds + 1):
        for client in sampler.sample(number).tolist():
            rounds.setdefault(client, []).append(number)
    return rounds


def _draws(node: Node, client: int, rounds: Sequence[int]) -> Iterator[np.ndarray]:
    """Distinct negatives of each round of a client, and of its fine-tuning."""
    experiment = node.experiment
    trained = [(experiment.step, "client", number) for number in rounds]
    for section, name, number in (
        *trained,
        (experiment.fine_tune_step(), "fine-tune", experiment.rounds),
    ):
        step = node.step(section)
        if _draws_negatives(step) and step.config.epochs:
            random = stream(experiment.seed, name, client, number)
            batches = step.batches(node.population.client(client), random)
            filled = np.arange(batches.items.shape[1]) < batches.sizes[:, None]
            yield np.unique(batches.items[filled & (batches.labels == 0)])


def _draws_negatives(step: Step) -> bool:
    """True if a step trains on sampled negatives."""
    return "negatives" in type(step.config).model_fields
