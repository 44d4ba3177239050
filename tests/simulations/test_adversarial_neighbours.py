# SPDX-License-Identifier: Apache-2.0
"""Whole private runs on two tables that differ in one client: for every split and perturbation that
private runs accept, and for central and federated systems, the exact sums move by at most what the
ledger charges."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from fedrec.errors import DataError, ExperimentError
from fedrec.privacy.accounting import events
from simulations import runner
from tests.captured_noise import Captured, captured, sensitivities

USERS, ITEMS, EXCHANGED = 24, 12, 5
Row = tuple[str, int, float, int]

GRAM = (
    "model={name='item-weights', items=6}",
    "step={name='gram', exponent=0.5}",
    "strategy={name='popularity-start', main={name='gram', solution='ease'}}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.3, parameters=['item.weights'],"
    " phases={popularity={parameters=['item.bias'], clip-norm=0.5}}}",
)
MEANS = (
    "task=rating",
    "model={name='pnbm', items=6, rank=2}",
    "step={name='pnbm'}",
    "strategy={name='means-start', main={name='reptile'}}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.02, parameters=['similarity*'],"
    " phases={means={parameters=['item.*'], clip-norm=0.5}}}",
)
ADD_REMOVE = "privacy.adjacency=add-remove"
SPLITS = [
    "{name='ratio'}",
    "{name='ratio', order='temporal'}",
    "{name='kfold', fold=2, validation=0.2}",
    "{name='leave-one-out'}",
    "{name='leave-one-out', order='random'}",
    "{name='bounded', omega=0.5, delta=0.5, dimension=2.0, p-min=0.0}",
    "{name='global-time', test-from=80}",
    "{name='user-holdout'}",
    "{name='user-holdout', stream='client'}",
]
PERTURBED = [
    "{name='random-replacement'}",
    "{name='randomised-response', epsilon=3.0}",
    "{name='targeted', attribute='group', epsilon=3.0, select='random'}",
]


def table_of(exchanged: Sequence[Row] | None) -> list[Row]:
    """Rows (user, item, rating, time) of all users; the first one has all items, so that their list
    is the same whatever the exchanged user has. None: that user is not there."""
    random = np.random.default_rng(2)
    rows: list[Row] = [("u00", item, 4.0, item) for item in range(ITEMS - 1)]
    for user in range(1, USERS):
        items = random.choice(ITEMS - 1, random.integers(4, 9), replace=False)
        rated = [(f"u{user:02}", int(item), float(random.integers(1, 6))) for item in items]
        drawn = [(*row, int(random.integers(100))) for row in rated]
        if user == EXCHANGED:
            drawn = [] if exchanged is None else list(exchanged)
        rows += drawn
    return [*rows, ("u00", ITEMS - 1, 5.0, 99)]


def rows_of_client(items: Sequence[int], rating: float = 5.0) -> list[Row]:
    return [(f"u{EXCHANGED:02}", item, rating, 7 * item) for item in items]


OWN = rows_of_client([1, 2, 3, 4, 5, 6])
NEIGHBOURS = [OWN[:-1], OWN[:1], rows_of_client(range(ITEMS - 1)), rows_of_client([7, 8, 9], 1.0)]


@pytest.fixture
def play(tiny_experiment, tmp_path):
    """Runs settings on a table: the releases, and the events in the ledger, by round."""

    def run(rows, settings, held=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        lines = [f"{u},{i},{rating},{time},{'ab'[int(u[1:]) % 2]}" for u, i, rating, time in rows]
        (folder / "data.csv").write_text("\n".join(["user,item,rating,time,group", *lines, ""]))
        columns = {"rating": "rating", "time": "time", "user-features": ["group"]}
        dataset = {"name": "table", "path": str(folder / "data.csv"), **columns}
        made = {**tiny_experiment(), "dataset": dataset}
        del made["positive-above"]
        overrides = ["sampler={name='full'}", "evaluation.every=0", "engine.nodes=1", *settings]
        with captured(held) as seen:
            runner.run(made, overrides, output=folder / "run")
        charged = {}
        for ledger in (folder / "run").rglob("privacy.jsonl"):
            for line in map(json.loads, ledger.read_text().splitlines()):
                charged[line["round"]] = events.from_record(line["event"])
        return seen, charged

    return run


def largest_share(
    before: tuple[Sequence[Captured], dict], after: tuple[Sequence[Captured], dict]
) -> float:
    """The largest move of an exact sum / what is charged for it."""
    assert before[1] == after[1]
    shares = [
        one.moved(other) / sensitivities(one, before[1][one.address[0]])
        for one, other in zip(before[0], after[0], strict=True)
    ]
    return max(shares)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("system", [GRAM, MEANS], ids=["gram", "means"])
def test_sums_of_a_federated_run_move_by_what_is_charged(play, system, split):
    settings = [*system, f"split={split}"]
    before = play(table_of(OWN), settings)
    assert all(any(value.any() for value in release.exact.values()) for release in before[0])
    shares = [
        largest_share(before, play(table_of(other), settings, before[0])) for other in NEIGHBOURS
    ]
    assert max(shares) <= 1 + 1e-4, shares


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", PERTURBED)
def test_sums_of_perturbed_rows_move_by_what_is_charged(play, perturbation):
    settings = [*GRAM, "split={name='leave-one-out'}", f"perturb={perturbation}"]
    before = play(table_of(OWN), settings)
    shares = [
        largest_share(before, play(table_of(other), settings, before[0])) for other in NEIGHBOURS
    ]
    assert max(shares) <= 1 + 1e-4, shares


@pytest.mark.slow
def test_sums_move_by_what_is_charged_when_a_client_is_removed(play):
    """The held-out users are then the same ones by name."""
    settings = [*GRAM, ADD_REMOVE, "split={name='user-holdout', stream='client', test-users=0.3}"]
    before = play(table_of(OWN), settings)
    assert largest_share(before, play(table_of(None), settings, before[0])) <= 1 + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("system", ["dp-popularity', clip-norm=0.5", "dp-gram', items=6"])
def test_sums_of_a_central_system_move_by_what_is_charged(play, system, split):
    settings = [*GRAM[:3], f"split={split}", f"evaluation.baselines=[{{name='{system}}}]"]
    before = play(table_of(OWN), settings)
    shares = [
        largest_share(before, play(table_of(other), settings, before[0])) for other in NEIGHBOURS
    ]
    assert max(shares) <= 1 + 1e-4, shares


SHUFFLED = "split={name='ratio', stream='dataset'}"
REFUSED = {
    "[privacy]": [*GRAM, SHUFFLED],
    "[privacy], perturbed": [*GRAM, "perturb={name='upc-sdg'}"],
    "baseline dp-popularity": [SHUFFLED, "evaluation.baselines=['dp-popularity']"],
    "baseline dpsgd-mf": [SHUFFLED, "task=rating", "evaluation.baselines=['dpsgd-mf']"],
    "step dpvae": [SHUFFLED, "model={name='vae', latent=4, hidden=8}", "step={name='dpvae'}"],
    "add-remove": [*GRAM, ADD_REMOVE],
}
PRIVREC = (
    "model={name='privrec', embedding=4, hidden=[8]}",
    "step={name='sgd', epochs=1}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.5}",
    "split={name='user-holdout', test-users=0.3}",
)


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_a_guarantee_that_would_not_hold_is_refused(play, settings):
    with pytest.raises(ExperimentError, match="does not hold with") as error:
        play(table_of(OWN), settings)
    assert "one client decide" in str(error.value)


def test_categories_that_are_collected_from_rows_are_refused_and_declared_ones_are_not(play):
    """A model's rows are those of the declared categories, whoever is in them."""
    with pytest.raises(ExperimentError, match="does not protect the categories") as error:
        play(table_of(OWN), PRIVREC)
    assert "dataset.user-categories.group" in str(error.value)
    play(table_of(OWN), [*PRIVREC, "model.features=false"])
    declared = [*PRIVREC, "dataset.user-categories={group=['b', 'c']}"]
    releases, _ = play(table_of(OWN), declared)
    assert {len(release.exact["user.group"]) for release in releases} == {3}  # b, c and other


def test_a_declared_feature_that_is_not_there_is_named(play):
    with pytest.raises(DataError, match="no feature 'gruop'") as error:
        play(table_of(OWN), [*GRAM, "dataset.user-categories={gruop=['b']}"])
    assert "group" in str(error.value)
