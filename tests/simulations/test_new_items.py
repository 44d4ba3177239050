# SPDX-License-Identifier: Apache-2.0
"""Items without training rows: the split, systems that know them by their vectors, and items that
came after a run."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.closed_form import (
    ContentKnn,
    ContentKnnConfig,
    ContentMap,
    ContentMapConfig,
    Puresvd,
    PuresvdConfig,
)
from fedrec.data.interactions import FeatureTable, Interactions, Vectors
from fedrec.data.population import POPULATIONS
from fedrec.data.splits.folds import NewItems, NewItemsConfig
from fedrec.errors import DataError, ExperimentError
from fedrec.evaluation.tables import NEW, NEW_OF_ALL, OLD, HeldOutLists, Metrics, ranking_metrics
from fedrec.experiment.schema import load
from fedrec.models.linear import LEFT, MAP, RIGHT
from fedrec.runs.folder import Result
from simulations import runner
from simulations.own_table import OwnTable

WIDTH = 6
USERS, ITEMS = 60, 40
FED = {
    "content-map": {"model": {"name": "content-map"}, "strategy": {"name": "content-map"}},
    "fold-in": {"model": {"name": "fold-in"}, "strategy": {"name": "fold-in"}},
    "linear": {"model": {"name": "item-weights"}, "strategy": {"name": "gram"}},
}


def vectors_of(items: int, seed: int = 0) -> np.ndarray:
    """Two kinds of items, in turns, and noise."""
    random = np.random.default_rng(seed)
    rows = 0.3 * random.standard_normal((items, WIDTH))
    rows[:, 0] += 1 - 2 * (np.arange(items) % 2)
    return rows.astype(np.float32)


def rows_of() -> pd.DataFrame:
    """Users like items of one kind; item 0 and user 0 come first."""
    random = np.random.default_rng(1)
    rows = []
    for user in range(USERS):
        items = np.sort(random.choice(np.arange(user % 2, ITEMS, 2), 8, replace=False))
        rows += [(user, item, 100 * item + user) for item in items]
    return pd.DataFrame(rows, columns=["user", "item", "time"])


def write_vectors(path, values: np.ndarray, ids: list[str]) -> str:
    np.save(path, values)
    path.with_suffix(".txt").write_text("\n".join(ids))
    return str(path)


def table(folder, frame: pd.DataFrame, system: str = "content-map", **more) -> dict:
    frame.to_csv(folder / "rows.csv", index=False)
    ids = [str(item) for item in range(ITEMS)]
    file = write_vectors(folder / "titles.npy", vectors_of(ITEMS), ids)
    main = FED[system]
    return {
        "name": "new",
        "rounds": 2,
        "dataset": {
            "name": "table",
            "path": str(folder / "rows.csv"),
            "time": "time",
            "item-vectors": [file],
        },
        "split": {"name": "new-items"},
        "model": main["model"],
        "step": {"name": "gram"},
        "strategy": {"name": "popularity-start", "main": main["strategy"]},
        "sampler": {"name": "full"},
        "evaluation": {"every": 0, "ks": [5], "baselines": ["popularity"]},
        **more,
    }


@pytest.fixture
def data(tmp_path) -> Interactions:
    return POPULATIONS.population(load(table(tmp_path, rows_of()))).interactions


def test_new_items_have_no_row_outside_the_test_part(data):
    part = NewItems(NewItemsConfig(share=0.2, validation=0.2), 0).split(data)
    new = {name: set(items) for name, items in part.new_items.items()}
    assert new["test"] and new["validation"] and not new["test"] & new["validation"]
    rows = part.train_rows, part.validation_rows, part.test_rows
    train, validation, test = (set(data.items[own]) for own in rows)
    assert not train & (new["test"] | new["validation"])
    assert not validation & new["test"] and not test & new["validation"]
    assert sorted(np.concatenate(rows)) == list(range(len(data)))
    assert test - new["test"] and validation - new["validation"]
    again = NewItems(NewItemsConfig(share=0.2, validation=0.2), 1).split(data)
    assert set(again.new_items["test"]) != new["test"]


def test_the_newest_items_are_those_first_used_last(data):
    split = NewItems(NewItemsConfig(order="newest", share=0.25, old_rows=0.0), 0)
    part = split.split(data)
    assert part.new_items["test"].tolist() == list(range(ITEMS - ITEMS // 4, ITEMS))
    assert split.depends_on("replace-one")
    assert not NewItems(NewItemsConfig(), 0).depends_on("add-remove")
    with pytest.raises(DataError, match="at least one new item"):
        NewItems(NewItemsConfig(share=1e-9), 0).split(data)


def test_a_planted_interaction_with_a_new_item_is_found_nowhere(tmp_path):
    """In training, popularity, weights of vectors, validation: a row more of a new item is in the
    test part alone."""
    split = {"name": "new-items", "validation": 0.2}
    frame = rows_of()
    results, populations = [], []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        experiment = load(table(folder, frame, split=split), [])
        population = POPULATIONS.population(experiment)
        populations.append(population)
        results.append(runner.run(experiment, output=folder / "run"))
        data = population.interactions
        if not number:
            new = data.item_ids[population.partition.new_items["test"][0]]
            mine = frame.loc[frame["item"] == int(new), "user"]
            user = next(user for user in range(USERS) if user not in set(mine))
            planted = pd.DataFrame([{"user": user, "item": int(new), "time": 5}])
            frame = pd.concat([planted, frame])
    before, after = populations
    for part in ("training", "known", "validation"):
        rows = [p.rows(np.arange(USERS), part) for p in populations]
        assert all(map(np.array_equal, rows[0].lists, rows[1].lists)), part
    assert len(after.partition.test_rows) == len(before.partition.test_rows) + 1
    np.testing.assert_array_equal(before.popularity, after.popularity)
    for name, value in results[0].parameters.items():
        np.testing.assert_array_equal(value, results[1].parameters[name], err_msg=name)


def test_new_and_old_items_are_ranked_apart_and_together(tmp_path):
    experiment = load(table(tmp_path, rows_of()), [])
    population = POPULATIONS.population(experiment)
    clients = population.evaluated_clients("test")
    scores = torch.rand(len(clients), ITEMS, generator=torch.Generator().manual_seed(0))
    metrics = Metrics("ranking", experiment.evaluation)
    columns = HeldOutLists(population, metrics, experiment.evaluation).measure(clients, scores)
    new = np.zeros(ITEMS, dtype=bool)
    new[population.partition.new_items["test"]] = True
    lists = population.held_out(clients, "test")
    wanted = (lists.relevant & new).any(1)
    everything = np.ones_like(new)
    cases = (NEW, new, new), (NEW_OF_ALL, everything, new), (OLD, ~new, ~new)
    for prefix, items, counted in cases:
        relevant = lists.relevant & counted
        masks = {"seen": lists.seen, "known": lists.known, "relevant": relevant}
        kept = {name: torch.from_numpy(mask[:, items]) for name, mask in masks.items()}
        expected = ranking_metrics(scores[:, items], ks=(5,), **kept)  # pyright: ignore[reportArgumentType]
        for name in ("ndcg@5", "hits@5", "recall@5"):
            mine = columns.metrics[prefix + name]
            np.testing.assert_allclose(mine[wanted], expected[name][wanted], err_msg=prefix + name)
            assert np.isnan(mine[~wanted]).all()


def histories(items: np.ndarray, values: np.ndarray | None) -> Histories:
    """Each user's items `[users, n]`."""
    users, each = items.shape
    vectors = () if values is None else (Vectors("v", values, np.ones(len(values), bool)),)
    catalogue = ITEMS if values is None else len(values)
    features = FeatureTable(catalogue, vectors=vectors)
    offsets = np.arange(users + 1) * each
    return Histories(catalogue, offsets, items.ravel(), item_features=features)


def test_neighbours_by_content_are_sums_of_a_power_of_cosines():
    values = np.array([[1, 0], [3, 4], [0, -2]], dtype=np.float32)
    knn = ContentKnn(ContentKnnConfig())
    given = histories(np.array([[0]]), values)
    knn.fit(given)
    np.testing.assert_allclose(knn.scores(given)[0], [1, 0.6**6, 0], atol=1e-6)
    for system in (ContentKnn(ContentKnnConfig()), ContentMap(ContentMapConfig())):
        system.fit(histories(np.array([[0]]), None))  # nothing is known: all are alike
        assert system.scores(histories(np.array([[0]]), None))[0, 1:].unique().numel() == 1


def test_mapped_factors_are_a_ridge_regression_and_old_ones_stay():
    random = np.random.default_rng(3)
    items = np.stack([random.choice(30, 6, replace=False) for _ in range(50)])
    values = vectors_of(ITEMS)
    given = histories(items, values)
    ours = ContentMap(ContentMapConfig(factors=8, map_regularisation=2.0))
    ours.fit(given)
    svd = Puresvd(PuresvdConfig(factors=8))
    svd.fit(given)
    theirs = svd.scores(given).numpy()
    used = np.bincount(items.ravel(), minlength=ITEMS) > 0
    np.testing.assert_allclose(ours.scores(given).numpy()[:, used], theirs[:, used], atol=1e-5)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    known = unit[used].astype(np.float64)
    solved = np.linalg.solve(known.T @ known + 2 * np.eye(WIDTH), known.T @ theirs.T[used])
    expected = unit[~used] @ solved
    np.testing.assert_allclose(ours.scores(given).numpy()[:, ~used].T, expected, atol=1e-5)


@pytest.mark.parametrize("solution", ["puresvd", "ease"])
def test_the_federated_map_is_the_centralised_one(tmp_path, solution):
    settings = {"solution": solution, "regularisation": 20.0}
    changed = table(tmp_path, rows_of())
    changed["model"] = {"name": "content-map", "factors": 40 if solution == "ease" else 8}
    changed["strategy"]["main"] = {"name": "content-map", **settings}
    central = {"name": "content-map", "factors": 8, **settings}
    changed["evaluation"]["baselines"] = [central, "random"]
    experiment = load(changed, [])
    result = runner.run(experiment, output=tmp_path / "run")
    central = result.baselines["content-map"]
    for name, value in central.items():
        assert result.metrics[name] == pytest.approx(value, abs=1e-6, nan_ok=True), name
    assert central["new-ndcg@5"] > 1.2 * result.baselines["random"]["new-ndcg@5"]
    population = POPULATIONS.population(experiment)
    liked = population.histories(np.arange(USERS)).astype(np.float64)
    mine = liked @ result.parameters[LEFT] @ result.parameters[RIGHT].T
    baseline = ContentMap(ContentMapConfig.parse({"factors": 8, **settings}, at="x"))
    rows = population.rows(np.arange(USERS), positive=True)
    given = Histories(ITEMS, *rows.lists, item_features=population.interactions.item_features)
    baseline.fit(given)
    np.testing.assert_allclose(mine, baseline.scores(given), atol=1e-6)


def test_the_private_map_costs_what_the_sum_costs(tmp_path):
    spent = []
    for system, name in (("content-map", "item.products"), ("linear", "item.weights")):
        privacy = {
            "epsilon": 5.0,
            "delta": 1e-3,
            "clip-norm": 8.0,
            "parameters": [name],
            "phases": {"popularity": {"parameters": ["item.bias"], "clip-norm": 3.0}},
        }
        folder = tmp_path / system
        folder.mkdir()
        changed = table(folder, rows_of(), system, privacy=privacy)
        changed["model"] = {**changed["model"], "items": 20}
        result = runner.run(load(changed, []), output=folder / "run")
        spent.append(result.epsilon)
        assert any("list of items, with their features and vectors" in x for x in result.privacy)
    assert spent[0] == spent[1] == pytest.approx(5.0, abs=0.02)
    changed["split"]["order"] = "newest"
    with pytest.raises(ExperimentError, match="first interaction of each item"):
        runner.run(load(changed, []), output=tmp_path / "refused")


def test_an_item_of_the_vectors_alone_changes_nothing(tmp_path):
    """Vectors of items that are not in the data are left out, whatever they are."""
    results = []
    for more in (0, 3):
        folder = tmp_path / str(more)
        folder.mkdir()
        changed = table(folder, rows_of())
        values = np.concatenate([vectors_of(ITEMS), 99 * vectors_of(more, 5)])
        write_vectors(folder / "titles.npy", values, [str(i) for i in range(ITEMS + more)])
        results.append(runner.run(load(changed, []), output=folder / "run"))
    for name, value in results[0].parameters.items():
        np.testing.assert_array_equal(value, results[1].parameters[name], err_msg=name)


def later(folder, values: np.ndarray, ids: list[str]):
    frame = pd.DataFrame(values, columns=[f"v{n}" for n in range(values.shape[1])])
    frame.insert(0, "item", ids)
    frame.to_csv(folder / "new.csv", index=False)
    return folder / "new.csv"


@pytest.mark.parametrize("system", ["content-map", "fold-in"])
def test_items_that_came_after_a_run_are_ranked_by_their_vectors(tmp_path, fedrec, system):
    result = runner.run(load(table(tmp_path, rows_of(), system), []), output=tmp_path / "run")
    values = vectors_of(10, seed=7)
    file = later(tmp_path, values, [f"n{number}" for number in range(10)])
    lists = Result.load(result.folder).recommend(k=4, new_items=file)
    assert lists["item"].str.startswith("n").all()
    kinds = lists["item"].str[1:].astype(int) % 2
    assert (kinds == lists["user"].astype(int) % 2).mean() > 0.8
    same = write_vectors(tmp_path / "new.npy", values, [f"n{number}" for number in range(10)])
    again = Result.load(result.folder).recommend(k=4, new_items=same)
    pd.testing.assert_frame_equal(lists, again)
    if system == "content-map":
        population = POPULATIONS.population(result.experiment)
        tastes = population.histories(np.arange(USERS)) @ result.parameters[LEFT]
        unit = values / np.linalg.norm(values, axis=1, keepdims=True)
        expected = tastes @ (unit @ result.parameters[MAP]).T
        best = lists.loc[lists["rank"] == 1].set_index("user")["score"]
        scores = best.loc[population.interactions.user_ids.tolist()].to_numpy()
        np.testing.assert_allclose(scores, expected.max(1), atol=1e-5)
    given = ("recommend", tmp_path / "run", "--user", 3, "--top", 2)
    assert fedrec(*given, "--new-items", file)[1].count("\n3,") == 2


def test_a_network_of_vectors_without_ids_ranks_later_items(tmp_path):
    changed = table(tmp_path, rows_of())
    changed |= {
        "model": {"name": "privrec", "item-ids": False, "item-bias": True, "hidden": [4]},
        "step": {"name": "sgd"},
        "strategy": {"name": "reptile"},
        "sampler": {"name": "fixed-size", "cohort": 10},
    }
    result = runner.run(load(changed, []), output=tmp_path / "run")
    assert "item.id" not in result.parameters and "item.titles" in result.parameters
    file = later(tmp_path, vectors_of(10, seed=7), [f"n{number}" for number in range(10)])
    assert len(result.recommend(["3"], k=10, new_items=file)) == 10
    changed["model"] = {"name": "privrec", "hidden": [4]}
    with_ids = runner.run(load(changed, []), output=tmp_path / "ids")
    with pytest.raises(ExperimentError, match="cannot rank items that it was not trained with"):
        with_ids.recommend(["3"], new_items=file)
    changed["dataset"].pop("item-vectors")
    changed["model"]["item-ids"] = False
    with pytest.raises(ExperimentError, match="neither ids nor features"):
        runner.run(load(changed, []), output=tmp_path / "bare")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    return runner.run(load(table(folder, rows_of()), []), output=folder / "run")


@pytest.mark.parametrize(
    ("ids", "values", "wrong"),
    [
        (["a", "b"], vectors_of(2)[:, :-1], "5 numbers"),
        (["a", "a"], vectors_of(2), "'a': twice"),
        (["a", ""], vectors_of(2), "'': none"),
        (["a", "7"], vectors_of(2), "'7': in the run"),
        (["a", "b"], np.full((2, WIDTH), np.nan), "NaN|could not convert"),
    ],
)
def test_wrong_files_of_new_items_are_refused(tmp_path, result, ids, values, wrong):
    with pytest.raises(DataError, match=wrong):
        result.recommend(new_items=later(tmp_path, values, ids))
    pd.DataFrame({"item": ["a"]}).to_parquet(file := tmp_path / "new.parquet")
    with pytest.raises(DataError, match=r"cannot be ranked\n.*a CSV file with the columns item"):
        result.recommend(new_items=file)


def test_an_export_has_the_new_items(tmp_path, fedrec, result):
    pytest.importorskip("onnxruntime")
    file = later(tmp_path, vectors_of(10, seed=7), [f"n{number}" for number in range(10)])
    given = ("-o", tmp_path / "out", "--new-items", file, "--user", 3)
    assert fedrec("export", result.folder, *given)[0] == 0
    items = json.loads((tmp_path / "out/scoring.json").read_text())["items"]
    assert len(items) == ITEMS + 10 and items[-1] == "n9"


def test_a_run_of_own_data_says_what_vectors_gain(tmp_path, capsys):
    changed = table(tmp_path, rows_of())
    files = tuple(map(Path, changed["dataset"]["item-vectors"]))
    OwnTable(item_vectors=files).experiment(tmp_path / "rows.csv", [])
    shown = capsys.readouterr().err
    gain = r" items .* ndcg@10 ([.\d]+) with them, ([.\d]+) without"
    new, old = (re.search(f"for {kind}{gain}", shown) for kind in ("new", "other"))
    assert new and old and float(new[1]) > 1.2 * float(new[2])
    OwnTable(item_vectors=files, epsilon=5.0).experiment(tmp_path / "rows.csv", [])
    assert "not measured under privacy" in capsys.readouterr().err
