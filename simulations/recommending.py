# SPDX-License-Identifier: Apache-2.0
"""Scores and recommendations of a finished run, in the ids of its data.

A user is scored as in the run's final evaluation: from its training rows and, if the experiment has
on-device fine-tuning, with parameters tuned on these rows; private parameters are those saved by
its node. Items with a row of the user in any part of the data are not recommended. Where a history
is given, all rows of a user count (`simulations.later_data`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from clients.blocks import to_device
from clients.evaluation import client_scorer
from clients.node import Node
from clients.step import Step, private_names
from fedrec.components.registry import DATASET
from fedrec.data.interactions import Interactions
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import DataError, ExperimentError
from fedrec.metrics.ranks import best_items
from fedrec.models.base import is_generated
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import check_ids, read_ids, write_ids
from server.checkpoint import Checkpoints
from server.early_stopping import ending
from simulations.later_data import read_history, with_history, with_items_of

_CELLS = 4_000_000  # users times items that are scored at once


def load_result(folder: str | Path) -> Result:
    """Load the result of a finished run with its final parameters.

    Raises:
        RunError: it is no run folder, or the run is not finished.
    """
    run = RunFolder(Path(folder))
    return with_parameters(run.read_result())


def with_parameters(result: Result) -> Result:
    """Add the run's final parameters to a result; none for centralised systems."""
    if not result.experiment.federated:
        return result
    state = Checkpoints.of(RunFolder(result.folder)).latest()
    return result if state is None else replace(result, parameters=ending(state)[1])


def keep_ids(run: RunFolder) -> np.ndarray | None:
    """Write the ids of the data into a run folder, and return those of users by their numbers,
    `[users]`; None if this process has not read the data."""
    population = POPULATIONS.cached(run.experiment)
    if population is None:
        return None
    write_ids(run.path, population.interactions)
    return population.interactions.user_ids


def scores(result: Result, users: Sequence[object] | None = None) -> pd.DataFrame:
    """Scores of the whole catalogue, one row per user, one column per item, by the data's ids.

    Args:
        result: of a finished run.
        users: ids as in the data; None: all users.

    Raises:
        DataError: a user is not in the data, or users, items or features of the run are no longer
            there.
        ExperimentError: the run has no federated system, or its parameters are made for each user.
    """
    population = population_of(result)
    clients = clients_of(population, users)
    blocks = [block for _, block in _scored(result, population, clients)]
    values = np.concatenate(blocks) if blocks else np.zeros((0, population.interactions.num_items))
    data = population.interactions
    index = pd.Index(data.user_ids[clients], name="user")
    return pd.DataFrame(values, index=index, columns=pd.Index(data.item_ids, name="item"))


def recommend(
    result: Result,
    users: Sequence[object] | None = None,
    k: int = 10,
    history: pd.DataFrame | str | Path | None = None,
    new_items: str | Path | None = None,
) -> pd.DataFrame:
    """Recommend the best k items to each user, without items of the user's rows.

    Args:
        result: of a finished run.
        users: ids as in the data or in the history; None: all users, those of the history if there
            is one.
        k: >= 1; users with few unknown items get fewer.
        history: further rows, of users of the run or of others, or their file; see
            `simulations.later_data.read_history`.
        new_items: file of items that the run did not have, which alone are ranked; see
            `simulations.later_data`.

    Returns:
        One row per recommendation, by user and rank: `user`, `rank` (from 1), `item`, `score`.

    Raises:
        DataError: see `scores`.
        ExperimentError: likewise, or k is below 1.
    """
    if k < 1:
        raise ExperimentError(
            "nothing to recommend",
            got=str(k),
            fix="set k to at least 1: --top 10",
        )
    more = None if history is None else read_history(history, result.experiment)
    old_items = 0
    population = population_of(result, more)
    if new_items is not None:
        old_items = population.interactions.num_items
        result, population = with_new_items(result, population, new_items)
    if more is not None and users is None:
        users = more.user_ids.tolist()
    data = population.interactions
    frames = []
    for part, values in _scored(result, population, clients_of(population, users)):
        values[population.rows(part, "all").mask()] = -np.inf
        values[:, :old_items] = -np.inf
        best = best_items(torch.from_numpy(values), min(k, values.shape[1])).numpy()
        top = np.take_along_axis(values, best, axis=1)
        row, column = np.nonzero(np.isfinite(top))
        frames.append(
            pd.DataFrame(
                {
                    "user": data.user_ids[part[row]],
                    "rank": column + 1,
                    "item": data.item_ids[best[row, column]],
                    "score": top[row, column],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def population_of(result: Result, more: Interactions | None = None) -> Population:
    """The clients of a run's data, with all rows of a history.

    Raises:
        DataError: users or items of the data are no longer those of the run.
        ExperimentError: the run has no parameters.
    """
    experiment = result.experiment
    if not experiment.federated or not result.parameters:
        raise ExperimentError(
            f"run {result.folder} has no parameters to score with",
            expected="a finished run of a federated system, from Result.load or fedrec.resume",
            got="centralised systems alone" if not experiment.federated else "no checkpoint",
            fix="run the experiment to its end: fedrec resume FOLDER",
        )
    POPULATIONS.renew(experiment)
    population = POPULATIONS.population(experiment)
    data = population.interactions
    check_ids(result.folder, data)
    if more is None:
        return population
    return with_history(experiment, data, more)


def with_new_items(
    result: Result, population: Population, source: str | Path
) -> tuple[Result, Population]:
    """A run, and the clients of its data, with further items behind its own.

    Args:
        result: of a finished run.
        population: of the run.
        source: the file of the new items, see `simulations.later_data`.

    Raises:
        DataError: the file is damaged, or its items are not new ones.
        ExperimentError: the model knows items by their interactions alone.
    """
    experiment = result.experiment
    item = getattr(experiment.settings(DATASET), "item", "item")
    grown = Population.of_parts(
        experiment,
        with_items_of(population.interactions, Path(source), item),
        population.partition,
        perturbed=population.perturbed,
        adversary=population.adversary,
    )
    model = host_of(result, grown, 0).model
    tensors = {name: torch.tensor(value) for name, value in result.parameters.items()}
    parameters = {name: value.numpy() for name, value in model.grown(tensors).items()}
    return replace(result, parameters=parameters), grown


def clients_of(population: Population, users: Sequence[object] | None) -> np.ndarray:
    """Clients of the given ids, `int64 [clients]`, in their order."""
    ids = population.interactions.user_ids
    if users is None:
        return np.arange(len(ids))
    if isinstance(users, str):  # a sequence of letters, which may be ids themselves
        raise ExperimentError(
            "users are one text", expected="a list of ids", got=repr(users), fix=f"[{users!r}]"
        )
    numbers = pd.Index(ids.astype(str)).get_indexer(pd.Index([str(user) for user in users]))
    unknown = [user for user, number in zip(users, numbers, strict=True) if number < 0]
    if unknown:
        raise DataError(
            f"unknown user {unknown[0]!r}",
            expected=f"ids as in the data, such as {ids[0]}",
            got=", ".join(repr(user) for user in unknown[:5]),
            fix="correct the ids; for new users give their rows to `fedrec recommend --history`",
        )
    return numbers.astype(np.int64)


def _scored(
    result: Result, population: Population, clients: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield clients and their scores `float32 [clients, items]`, in blocks, in order."""
    experiment = result.experiment
    size = max(1, _CELLS // population.interactions.num_items)
    nodes = experiment.engine.nodes or 1
    hosts: dict[int, Node] = {}
    for start in range(0, len(clients), size):
        part = clients[start : start + size]
        values = np.empty((len(part), population.interactions.num_items), dtype=np.float32)
        for number in np.unique(part % nodes).tolist():
            if number not in hosts:
                hosts[number] = host_of(result, population, number)
            mine = part % nodes == number
            values[mine] = _node_scores(hosts[number], result, part[mine])
        yield part, values


def host_of(result: Result, population: Population, client: int) -> Node:
    """The node of a run that hosts a client, with what is private there.

    Raises:
        ExperimentError: the parameters are made for each user by the server.
    """
    experiment = result.experiment
    nodes = experiment.engine.nodes or 1
    private = result.folder / "private"
    saved = (private / f"node-{client % nodes}.sqlite").exists()
    node = Node(experiment, client % nodes, nodes, private if saved else None)
    node.population = population
    if result.parameters and is_generated(node.model, result.parameters):
        raise ExperimentError(
            f"model {experiment.model.name!r} scores with parameters that its server makes for"
            " each user",
            expected="a system whose parameters are shared or private",
            fix="evaluate this system with the metrics of its run",
        )
    return node


def evaluation_of(
    node: Node, result: Result, clients: np.ndarray
) -> tuple[Step, dict[str, torch.Tensor]]:
    """The step with which a run's final evaluation scored clients `int64 [clients]`, and the
    parameters that it ended with.

    Raises:
        ExperimentError: the run has no parameters of a user.
        DataError: the features have changed since the run.
    """
    step = node.step(node.experiment.fine_tune_step())
    _check_served(node, step, result, clients)
    arrays = {name: np.ascontiguousarray(value) for name, value in result.parameters.items()}
    return step, to_device(arrays, node.device)


def _node_scores(node: Node, result: Result, clients: np.ndarray) -> np.ndarray:
    step, parameters = evaluation_of(node, result, clients)
    with torch.no_grad() if step.config.epochs == 0 else torch.enable_grad():
        scores = client_scorer(node, step, parameters, result.best_round)(clients)
    return scores.detach().cpu().numpy()


def _check_served(node: Node, step: Step, result: Result, clients: np.ndarray) -> None:
    """Check that the run has parameters of these users, and that the categories of features are
    unchanged."""
    known = read_ids(result.folder)
    private = private_names(step, result.parameters)
    if known is not None and private and step.config.epochs == 0:
        new = clients[clients >= len(known[0])]
        if len(new):
            raise ExperimentError(
                f"user {str(node.population.interactions.user_ids[new[0]])!r} came after the run,"
                " which has private parameters of each user",
                expected="users of the run, or fine-tuning on the device in the experiment",
                fix="run again with the new users",
            )
    data = node.population.interactions
    if not (data.user_features.features or data.item_features.features):
        return
    for name, value in node.fresh.items():
        if name in result.parameters and value.shape != result.parameters[name].shape:
            raise DataError(
                "the features have changed since the run",
                expected=f"categories for {name!r} of the shape {result.parameters[name].shape}",
                got=f"categories for {tuple(value.shape)}",
                fix="restore the features as they were, or run again",
            )
