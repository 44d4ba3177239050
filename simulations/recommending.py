# SPDX-License-Identifier: Apache-2.0
"""Scores and recommendations of a finished run, in the ids of its data.

A user is scored as in the run's final evaluation: from its training rows and, if the experiment has
on-device fine-tuning, with parameters tuned on these rows; private parameters are those saved by
its node. Items with a row of the user in any part of the data are not recommended. Where a history
is given, all rows of a user count.
"""

import logging
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
from fedrec.data.interactions import Feature, FeatureTable, Interactions, Vectors, known_labels
from fedrec.data.population import POPULATIONS, Population
from fedrec.data.reader import read_rows
from fedrec.data.readers.table import TableConfig, ids_of, indexed
from fedrec.data.splits.rules import Partition
from fedrec.data.tables import OwnLayout, columns_of, read_table, table_start
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.metrics.ranks import best_items
from fedrec.models.base import is_generated
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import check_ids, read_ids, write_ids
from server.checkpoint import Checkpoints
from server.evaluation import ending

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
            `_read_history`.
        new_items: file of items that the run did not have, which alone are ranked.

    Returns:
        One row per recommendation, by user and rank: `user`, `rank` (from 1), `item`, `score`.

    Raises:
        DataError: see `scores`.
        ExperimentError: likewise, or k is below 1.
    """
    if k < 1:
        raise ExperimentError(
            "nothing to recommend", got=str(k), fix="set k to at least 1: --top 10"
        )
    more = None if history is None else _read_history(history, result.experiment)
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
    return _with_history(experiment, data, more)


def with_new_items(
    result: Result, population: Population, source: str | Path
) -> tuple[Result, Population]:
    """A run, and the clients of its data, with further items behind its own.

    Args:
        result: of a finished run.
        population: of the run.
        source: the file of the new items, see `_with_items_of`.

    Raises:
        DataError: the file is damaged, or its items are not new ones.
        ExperimentError: the model knows items by their interactions alone.
    """
    experiment = result.experiment
    item = getattr(experiment.settings(DATASET), "item", "item")
    grown = Population.of_parts(
        experiment,
        _with_items_of(population.interactions, Path(source), item),
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


_LOG = logging.getLogger("fedrec")
_COLUMNS = {"rating": "rating", "time": "time"}  # columns where the data are no table
_HISTORY = Path("history")

# Interactions after a run, of its users or of others, in the run's numbering.
#
# Users and items of the run keep their numbers, to which parameters and private state belong. New
# users come behind them. Rows of new items are left out, as the run has no parameters for these.
# All rows are training rows: nothing is held out, and each user is served from its whole history.


def _read_history(source: pd.DataFrame | str | Path, experiment: Experiment) -> Interactions:
    """Rows of users from a table with the columns of the experiment's table; with the columns
    `user`, `item`, `rating` and `time` beside other data. The columns of ratings and times may be
    missing.

    Args:
        source: the rows, or their file (CSV, Parquet or JSON).
        experiment: of the run.

    Raises:
        DataError: a column is missing, or a value is wrong.
    """
    settings = experiment.settings(DATASET)
    config = (
        settings if isinstance(settings, TableConfig) else TableConfig.parse(_COLUMNS, at="history")
    )
    layout = OwnLayout({}, separator=config.separator, names=config.names)
    path = _HISTORY if isinstance(source, pd.DataFrame) else Path(source)
    present = list(source) if isinstance(source, pd.DataFrame) else table_start(path, layout).names
    left_out = {role: None for role in ("rating", "time") if getattr(config, role) not in present}
    config = config.model_copy(update=left_out)
    needed = {config.user: "dataset.user", config.item: "dataset.item"}
    more = [name for name in (config.rating, config.time) if name]
    kinds = {**dict.fromkeys(needed, str), **dict.fromkeys(more)}
    layout = replace(layout, columns=kinds, settings=needed)
    if isinstance(source, pd.DataFrame):
        frame = columns_of("history", source, layout)
    else:
        frame = read_table(path, layout)
    return indexed("history", frame, config, path)


def _with_history(experiment: Experiment, data: Interactions, history: Interactions) -> Population:
    """Add the rows and users of a history to a run's data, and return the clients.

    Raises:
        DataError: the run perturbed its training rows, or has ratings and the history has none.
    """
    if experiment.perturb is not None or (data.ratings is not None and history.ratings is None):
        raise DataError(
            "the history cannot be added to the data of the run",
            expected="rows with ratings where the data have them, and data without [perturb]",
            fix="add the column of ratings, or recommend to users of the run without a history",
        )
    users = pd.Index(data.user_ids.astype(str))
    names = pd.Index(history.user_ids.astype(str))
    users = users.append(names[~names.isin(users)])
    items = pd.Index(data.item_ids.astype(str)).get_indexer(history.item_ids.astype(str))
    known = items[history.items] >= 0
    if not known.all():
        _LOG.warning(
            "%s of %s rows are left out: their items are unknown to the run",
            f"{np.count_nonzero(~known):,}",
            f"{len(known):,}",
        )
    columns = {
        "users": (data.users, users.get_indexer(names)[history.users]),
        "items": (data.items, items[history.items]),
    }
    if data.ratings is not None and history.ratings is not None:
        columns["ratings"] = data.ratings, history.ratings
    if data.times is not None:  # rows without a time are as new as the newest
        newest = np.full(len(history), data.times.max(initial=0))
        columns["times"] = data.times, newest if history.times is None else history.times
    joined = {name: np.concatenate([old, new[known]]) for name, (old, new) in columns.items()}
    rows = replace(
        data,
        **joined,
        user_ids=ids_of(pd.Series(users), _HISTORY),
        user_features=data.user_features.extended(np.full(len(users) - data.num_users, -1)),
        published_test=None,
    )
    none = np.empty(0, dtype=np.int64)
    partition = Partition(none, np.arange(len(rows)), none, none)
    return Population.of_parts(experiment, rows, partition)


# Items that came after a run, which its model ranks by what is public of them, without training.
#
# Their file has the ids of the items in the column `item` (or as the data call it), and what the
# run knows of its own items: a column for each feature, such as `genres` with `Drama|Comedy`, and
# the numbers of the vector in all other columns. A file of vectors, `.npy` beside `.txt`, is enough
# where the run knows vectors alone. Categories that the run does not have are left out.


def _with_items_of(data: Interactions, path: Path, item: str) -> Interactions:
    """The data of a run with the items of a file behind its own; `item` is the name of the column
    of items.

    Raises:
        DataError: the file is damaged, an id is missing, is there twice or is one of the run's, or
            vectors have another length than the run's.
    """
    known = data.item_features
    if path.suffix == ".npy":
        names, values = read_rows(path)
        frame = pd.DataFrame(index=range(len(names)))
    else:
        names, frame, values = _table(path, item, known)
    ids = names.astype(str).str.strip()
    old = ids.isin(data.item_ids.astype(str))
    for wrong, got in ((ids == "", "none"), (ids.duplicated(), "twice"), (old, "in the run")):
        if wrong.any():
            raise _wrong(path, "new ids, each once", f"{ids[wrong][0]!r}: {got}", "correct the ids")
    vectors = tuple(_vectors(path, table, values) for table in known.vectors)
    features, texts = (
        tuple(_feature(feature, frame, words=kind is known.texts) for feature in kind)
        for kind in (known.features, known.texts)
    )
    rows = data.num_items + len(ids)
    numbers = np.issubdtype(data.item_ids.dtype, np.integer) and ids.str.isdecimal().all()
    added = ids.to_numpy(dtype=object).astype(np.int64 if numbers else object)
    return replace(
        data,
        item_ids=np.concatenate(
            [data.item_ids if numbers else data.item_ids.astype(object), added]
        ),
        item_features=FeatureTable(rows, features, texts, vectors),
    )


def _table(
    path: Path, item: str, known: FeatureTable
) -> tuple[pd.Index, pd.DataFrame, np.ndarray | None]:
    """Ids, columns of features, and vectors `[items, width]` of a table."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        ids = pd.Index(frame.pop(item if item in frame else "item"))
        named = [feature.name for feature in known.every if feature.name in frame]
        others = frame.drop(columns=named)
        values = others.to_numpy().astype(np.float32) if known.vectors else None
    except (OSError, ValueError, KeyError) as error:
        names = ", ".join(["item", *(feature.name for feature in known.every)])
        expected = f"a CSV file with the columns {names}, and the numbers of a vector in the others"
        raise _wrong(path, expected, str(error), "correct the table") from None
    return ids, pd.DataFrame(frame[named]), values


def _vectors(path: Path, known: Vectors, values: np.ndarray | None) -> Vectors:
    width = known.values.shape[1]
    if values is None or values.shape[1] != width or not np.isfinite(values).all():
        got = f"{0 if values is None else values.shape[1]} numbers"
        raise _wrong(
            path,
            f"{width} finite numbers of each item, as the vectors {known.name!r} of the run have",
            got if got != f"{width} numbers" else "NaN or infinity",
            "encode the new items like those of the run",
        )
    every = np.concatenate([known.values, values.astype(np.float32)])
    return Vectors(known.name, every, np.concatenate([known.known, np.ones(len(values), bool)]))


def _feature(known: Feature, frame: pd.DataFrame, *, words: bool) -> Feature:
    """A feature of the run's items and of the new ones behind them."""
    categories = set(known.categories)
    texts: list[str] = frame[known.name].tolist() if known.name in frame else [""] * len(frame)
    labels: list[list[str]] = []
    unknown = set[str]()
    for text in texts:
        if words:
            labels.append([w for w in Feature.words("", [text]).categories if w in categories])
        else:
            among, others = known_labels(text, categories) if text else ([], [])
            labels.append(list(dict.fromkeys(among)))
            unknown.update(others)
    if unknown:
        _LOG.warning("%s: the run has no %s; left out", known.name, ", ".join(sorted(unknown)[:5]))
    new = Feature.coded(known.name, known.categories, labels)
    return replace(
        known,
        offsets=np.concatenate([known.offsets, known.offsets[-1] + new.offsets[1:]]),
        codes=np.concatenate([known.codes, new.codes]),
    )


def _wrong(path: Path, expected: str, got: str, fix: str) -> DataError:
    return DataError(f"{path}: these items cannot be ranked", expected=expected, got=got, fix=fix)
