# SPDX-License-Identifier: Apache-2.0
"""Every federated private system with captured noise: its sums move by what is charged, and the
model that follows depends on its releases alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fedrec.components import registry
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import Partition, Split
from fedrec.privacy.accounting import events
from simulations import runner
from tests.captured_noise import Captured, captured, sensitivities
from tests.runs import charged

USERS, ITEMS = 9, 10  # users who train
RATINGS = tuple[tuple[int, float], ...]
LIKED: RATINGS = tuple((item, 5.0) for item in range(ITEMS))
LOW, HIGH = LIKED[:5], LIKED[5:]
EVERYTHING: RATINGS = (*LIKED[:-1], (ITEMS - 1, 1.0))  # a negative is left to draw
ALONE = "clip-norm=0.02"
COUNTED = "phases={popularity={parameters=['item.bias'], clip-norm=0.5, noise-factor=2.0}}"
SGD = ("step={name='sgd', epochs=2, batch-size=4, learning-rate=0.5}",)
GRAM = "step={name='gram', exponent=0.5, low-rated=0.3}"
COUNTS = "step={name='counts', low-rated=0.3}"
ALS = "step={name='als', weight=5.0}"
IALS = "model={name='ials', factors=3, spread=2.0"
MEANS = "phases={means={parameters=['item.*'], clip-norm=0.5, noise-factor=0.5}}"
PNBM = ("task=rating", "model={name='pnbm', items=6, rank=2}", "step={name='pnbm'}")
STAGE = "stage-one={rounds=1, step={name='sgd', epochs=1}}"
SYSTEMS: dict[str, tuple[str, ...]] = {
    "reptile": (*SGD, "strategy={name='reptile'}", ALONE),
    "reptile, local noise": (*SGD, "strategy={name='reptile'}", f"{ALONE}, placement='local'"),
    "fed-adam": (*SGD, "strategy={name='fed-adam'}", ALONE),
    "two-stage": (*SGD, f"strategy={{name='two-stage', {STAGE}}}", ALONE),
    "fcf": (f"{IALS}}}", ALS, "strategy={name='fcf'}", ALONE),
    "fed-als": (f"{IALS}, moments=true}}", ALS, "strategy={name='fed-als', weight=5.0}", ALONE),
    "gram-start": (
        f"{IALS}, moments=true, products=true}}",
        ALS,
        "strategy={name='gram-start', main={name='fed-als', weight=5.0}}",
        "clip-norm=0.02, parameters=['item.right', 'item.moments', 'user.gram'],"
        " phases={products={parameters=['item.products'], clip-norm=0.5}}",
    ),
    "gram": (
        "model={name='item-weights', items=6}",
        GRAM,
        "strategy={name='popularity-start', main={name='gram', solution='puresvd', factors=3}}",
        f"clip-norm=0.3, parameters=['item.weights'], {COUNTED}",
    ),
    "gram, ease": (
        "model={name='item-weights', items=6}",
        GRAM,
        "strategy={name='popularity-start', main={name='gram', solution='ease'}}",
        f"clip-norm=0.3, parameters=['item.weights'], {COUNTED}",
    ),
    "transitions": (
        "model={name='transitions', items=6, window=3}",
        "step={name='transitions', exponent=0.5}",
        "strategy={name='popularity-start', main={name='transitions', factors=3}}",
        f"clip-norm=0.3, parameters=['item.weights'], {COUNTED}",
    ),
    "fold-in": (
        "model={name='fold-in', items=6, factors=3, low-rated=0.3}",
        GRAM,
        f"strategy={{name='popularity-start', {COUNTS}, estimate='posterior-mean',"
        " main={name='fold-in'}}",
        f"clip-norm=0.3, parameters=['item.products'], {COUNTED}",
    ),
    "content-map": (
        "model={name='content-map', items=6, factors=3}",
        GRAM,
        "strategy={name='popularity-start', main={name='content-map'}}",
        f"clip-norm=0.3, parameters=['item.products'], {COUNTED}",
    ),
    "means-start": (
        *PNBM,
        "strategy={name='means-start', main={name='reptile'}}",
        f"clip-norm=0.02, parameters=['similarity*'], {MEANS}",
    ),
}
REFUSED = {"fedavg", "fedgnn", "gpfedrec", "metamf"} | {
    "bulyan",
    "krum",
    "median",
    "norm-bound",
    "trimmed-mean",
    "union",
}
"""Strategies that weigh clients by their data, send messages of their own to each client, or take
each client's update, which `[privacy]` refuses."""


class LastUserIsTested(Split):
    """All users but the last one train."""

    Config = Config

    def depends_on(self, adjacency):
        return ""

    def split(self, interactions: Interactions) -> Partition:
        tested = np.flatnonzero(interactions.users == USERS)
        train = np.setdiff1d(np.arange(len(interactions.users)), tested[::2])
        return Partition(np.arange(USERS), train, tested[:0], tested[::2])


@dataclass(frozen=True)
class Ran:
    """What a run released, what its ledger says of each round, and the parameters that follow."""

    releases: Sequence[Captured]
    charged: Mapping[int, events.Event]
    parameters: Mapping[str, np.ndarray]


def ratings(seed: int) -> list[RATINGS]:
    """Ratings of all training users; how popular items are, and how many users have, differ between
    seeds."""
    random = np.random.default_rng(seed)
    chances = random.permutation(np.geomspace(1, 0.02, ITEMS))
    chances /= chances.sum()
    return [
        tuple(
            (int(item), float(random.integers(1, 6)))
            for item in random.choice(ITEMS, random.integers(2, 4 + seed), False, chances)
        )
        for _ in range(USERS)
    ]


@pytest.fixture
def play(tiny_experiment, tmp_path):
    """Runs a system on the ratings of its training users; a further user, who is tested, has all
    items, so that the catalogue is the same."""

    def run(system: str, data: Sequence[RATINGS], held: Sequence[Captured] | None = None) -> Ran:
        *settings, privacy = SYSTEMS[system]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        rows = [
            f"{user},{item},{value},{time}"
            for user, own in enumerate([*data, LIKED])
            for time, (item, value) in enumerate(own)
        ]
        (folder / "data.csv").write_text("\n".join(["user,item,rating,time", *rows, ""]))
        made = {
            **tiny_experiment(),
            "dataset": {
                "name": "table",
                "path": str(folder / "data.csv"),
                "rating": "rating",
                "time": "time",
            },
            "split": {"name": f"{__name__}:LastUserIsTested"},
        }
        if "task=rating" in settings:
            del made["positive-above"]
        overrides = [
            "sampler={name='full'}",
            "evaluation.fine-tune={epochs=0}",
            "evaluation.every=0",
            "engine.nodes=1",
            *settings,
            f"privacy={{noise-multiplier=1.0, delta=1e-5, {privacy}}}",
        ]
        with captured(held) as seen:
            result = runner.run(made, overrides, output=folder / "run")
        events_of = {line.round_number: line.event for line in charged(folder / "run")}
        return Ran(
            seen, events_of, {name: value.copy() for name, value in result.parameters.items()}
        )

    return run


def test_no_strategy_that_can_be_private_is_left_out():
    text = " ".join(line for lines in SYSTEMS.values() for line in lines)
    names = {name for name, _ in registry.available(registry.STRATEGY)}
    assert {name for name in names if f"name='{name}'" in text} == names - REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_sums_move_by_what_is_charged_and_the_rest_follows_from_releases(play, system):
    """With one user's data exchanged, for every release, given the releases before; the bound is
    approached, or the users would prove little. With all users' data exchanged, the model is that
    of the releases."""
    others, nearest = ratings(0)[1:], {}
    before = play(system, [LOW, *others])
    assert set(before.charged) == {1, 2}
    for neighbour in (HIGH, EVERYTHING):
        after = play(system, [neighbour, *others], before.releases)
        assert before.charged == after.charged
        for first, second in zip(before.releases, after.releases, strict=True):
            number, kind = first.address[0], ", ".join(first.exact)
            share = first.moved(second) / sensitivities(first, before.charged[number])
            assert share <= 1 + 1e-4, f"{kind}: {share:.4g} times what is charged in {number}"
            nearest[number, kind] = max(share, nearest.get((number, kind), 0.0))
    assert {number for number, _ in nearest} == {1, 2} and min(nearest.values()) > 0.25, nearest
    other = play(system, ratings(1), before.releases)
    pairs = zip(before.releases, other.releases, strict=True)
    assert max(one.moved(another) for one, another in pairs) > 0, "the data should be others"
    assert set(other.parameters) == set(before.parameters)
    for name, value in before.parameters.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(other.parameters[name], value, err_msg=name)


def test_ratings_of_zero_or_less_end_no_private_run(play):
    """Whether a run ends must not depend on what a user rated; such ratings are at the lower end of
    the scale."""
    ended = play("means-start", [((0, 0.0), (3, -2.0), (7, 5.0)), *ratings(0)[1:]])
    lowest = play("means-start", [((0, 1.0), (3, 1.0), (7, 5.0)), *ratings(0)[1:]])
    assert set(ended.charged) == {1, 2}
    assert ended.releases[0].moved(lowest.releases[0]) == 0


@pytest.mark.parametrize("step", ["{name='sgd'}", "{name='maml'}"])
def test_a_client_that_likes_everything_ends_no_private_run(play, monkeypatch, step):
    """It has no negatives, and learns from its positives alone."""
    settings = (f"step={step}", "strategy={name='reptile'}", ALONE)
    monkeypatch.setitem(SYSTEMS, "everything", settings)
    ended = play("everything", [LIKED, *ratings(0)[1:]])
    assert set(ended.charged) == {1, 2}


def test_the_steps_without_signs_are_these():
    """All others cost 2 S under replace-one: their updates may point away from each other."""
    names = {name for name, _ in registry.available(registry.STEP)}
    unsigned = {
        name
        for name in names
        if getattr(registry.resolve(registry.STEP, name), "contributions", "signed") != "signed"
    }
    assert unsigned == {"counts", "gram", "rating-sums", "transitions"}
