# SPDX-License-Identifier: Apache-2.0
"""The populations that a process keeps, and data that are rewritten between two of its runs."""

import os

import pytest

from fedrec.data.cache import PopulationCache
from fedrec.experiment.loading import load
from simulations import runner

DATASETS = {
    "table": lambda path: {"name": "table", "path": str(path)},
    "canaries": lambda path: {
        "name": "simulations.attacks.canaries.population:CanaryUsers",
        "base": {"name": "table", "path": str(path)},
        "count": 3,
    },
}


def rewrite(path, users):
    """A table in which each user has eight items; written over what is there."""
    rows = [f"{user},{(user + item) % 12}" for user in range(users) for item in range(8)]
    path.write_text("\n".join(["user,item", *rows]) + "\n")


@pytest.fixture
def table(tiny_experiment):
    """An experiment on data without ratings."""
    return {key: value for key, value in tiny_experiment().items() if key != "positive-above"}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "table.csv"
    rewrite(path, 18)
    return path


@pytest.mark.parametrize("dataset", DATASETS)
def test_rewritten_data_are_read_again_by_what_begins_anew(table, path, dataset):
    table["dataset"] = DATASETS[dataset](path)
    experiment, kept = load(table), PopulationCache()
    first = kept.population(experiment)
    kept.renew(experiment)
    assert kept.population(experiment) is first
    rewrite(path, 25)
    assert kept.population(experiment) is first  # within a run it stays the same
    kept.renew(experiment)
    assert kept.population(experiment).interactions.num_users - first.interactions.num_users == 7


def test_a_table_of_the_same_size_and_a_table_of_features_are_noticed(table, path):
    features = path.with_name("sorts.csv")
    features.write_text("item,sort\n0,a\n1,b\n")
    table["dataset"] = {"name": "table", "path": str(path), "item-features": ["sorts.csv"]}
    experiment, kept = load(table), PopulationCache()
    for changed in (path, features):
        first = kept.population(experiment)
        changed.write_bytes(changed.read_bytes())
        os.utime(changed, ns=(1, 1))
        kept.renew(experiment)
        assert kept.population(experiment) is not first


def test_populations_from_elsewhere_are_kept(table, path):
    """A node of a cluster has the data from the object store, and perhaps no file."""
    table["dataset"] = DATASETS["table"](path)
    experiment, kept, other = load(table), PopulationCache(), PopulationCache()
    other.hold(experiment, kept.population(experiment))
    path.unlink()
    other.renew(experiment)
    assert other.cached(experiment) is kept.cached(experiment)


def test_a_second_run_of_a_process_is_on_the_new_table(table, path, tmp_path):
    table["dataset"] = DATASETS["table"](path)
    first = runner.run(table, output=tmp_path / "first")
    rewrite(path, 60)
    second = runner.run(table, output=tmp_path / "second")
    assert len(second.users) > len(first.users)
