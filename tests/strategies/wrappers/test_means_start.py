# SPDX-License-Identifier: Apache-2.0
"""Item means as a first round, and the federated neighbourhood model under one budget, on every
engine."""

import json

import numpy as np
import pytest

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from server.privacy.phase_plans import PhasePlans
from simulations import runner
from tests.runs import assert_close, parameters_in

START = (
    "strategy={name='means-start', damping=2.0, main={name='reptile', server-lr=1.0}}",
    "sampler={name='full'}",
    "evaluation.fine-tune.epochs=0",
)
PRIVATE = (
    "privacy={epsilon=3.0, delta=1e-5, clip-norm=0.1, backend='pld', parameters=['similarity*']}",
    "privacy.phases={means={parameters=['item.*'], clip-norm=2.0, noise-factor=0.5}}",
)


@pytest.fixture
def table(tiny_experiment):
    made = {
        **tiny_experiment(),
        "task": "rating",
        "model": {"name": "pnbm", "items": 12, "rank": 2},
    }
    made["step"] = {"name": "pnbm"}
    del made["positive-above"]
    return made


@pytest.fixture
def run(table, tmp_path):
    def go(*overrides, output="run", callbacks=()):
        return runner.run(
            table, [*START, *overrides], output=tmp_path / output, callbacks=callbacks
        )

    return go


def test_means_are_damped_means_of_the_training_ratings(run, table):
    found = parameters_in(run("rounds=1").folder)
    population = Population.of(load(table, START))
    _, items, ratings = population.rated(population.training_clients)
    counts, sums = np.bincount(items, minlength=30), np.bincount(items, ratings, 30)
    np.testing.assert_allclose(
        found["item.mean"][:, 0], (sums + 2 * ratings.mean()) / (counts + 2), atol=1e-4
    )
    assert np.array_equal(found["item.count"][:, 0], counts)


def test_means_and_similarities_are_charged_to_one_ledger(run):
    result = run(*PRIVATE, "rounds=3")
    lines = [
        json.loads(line)["event"]
        for line in (result.folder / "privacy.jsonl").read_text().splitlines()
    ]
    assert [line["phase"] for line in lines] == ["means", "main", "main"]
    multipliers = [line["noise_multiplier"] for line in lines]
    assert multipliers[0] == pytest.approx(0.5 * multipliers[1])
    assert multipliers[1] == multipliers[2]
    assert result.rounds["epsilon"].iloc[-1] == pytest.approx(3.0, rel=1e-3)
    one = parameters_in(run(*PRIVATE, "rounds=1", output="one").folder)
    # counts are noisy, on every row
    assert (one["item.count"] != np.round(one["item.count"])).all()


def test_the_first_round_is_charged_for_what_has_no_opposite(table):
    """Sums of ratings in [-1, 1] with counts move by sqrt(2) S, similarities by 2 S."""
    experiment = load(table, [*START, *PRIVATE, "rounds=3"])
    found = PhasePlans.before_a_run(experiment, np.arange(18)).plans
    assert found["means"].sensitivity == pytest.approx(2.0 * np.sqrt(2))
    assert found["main"].sensitivity == pytest.approx(2 * 0.1)


@pytest.mark.parametrize(
    "setting", ["strategy.step={name='rating-sums', scale=[0.0, 5.0]}", "model.scale=[0.5, 5.0]"]
)
def test_two_scales_are_refused(run, setting):
    with pytest.raises(ExperimentError, match="rating scales differ"):
        run("rounds=1", setting)


def test_learning_lowers_the_loss(run):
    """Mean squared error of the clients' own ratings, each from the others, before each round's
    steps."""
    losses = run("rounds=8", "step.learning-rate=0.5").rounds["loss"].to_numpy()
    assert np.isnan(losses[0]) and (np.diff(losses[1:]) < 0).all(), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "flower")]
)
def test_every_engine_gives_the_same(run, engine, shared_engine):
    settings = (*PRIVATE, "rounds=3", "engine.nodes=2")
    expected = parameters_in(run(*settings, output="serial").folder)
    found = parameters_in(run(*settings, f"engine.name={engine}", output=engine).folder)
    assert set(found) == {"item.mean", "item.count", "similarity.left", "similarity.right"}
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_without_means_is_refused(tiny_experiment, tmp_path):
    with pytest.raises(ExperimentError, match="item means"):
        runner.run(tiny_experiment(), START, output=tmp_path / "run")
