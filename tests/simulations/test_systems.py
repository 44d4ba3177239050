# SPDX-License-Identifier: Apache-2.0
"""Federated systems on all engines, and in interrupted runs: the same numbers."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedrec.data.population import Population
from fedrec.evaluation.lists import ranking_metrics
from fedrec.runs.folder import RunFolder
from simulations.attacks.system import TrainedSystem
from tests.runs import assert_same_run, resumed
from tests.systems import DP_TRANSITIONS, FOLD_IN, METAMF, SYSTEMS, TRANSITIONS

TRIMMED = ("strategy={name='trimmed-mean', cut=0.3}", "rounds=2")


@pytest.fixture
def run_metamf(run_tiny):
    return lambda *more, **others: run_tiny(*METAMF, *more, **others)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "flower")]
)
@pytest.mark.parametrize(
    "settings",
    [*SYSTEMS.values(), FOLD_IN, TRANSITIONS, DP_TRANSITIONS, TRIMMED],
    ids=[*SYSTEMS, "fold-in", "transitions", "dp-transitions", "plug-in that sees each update"],
)
def test_an_engine_gives_the_serial_engines_numbers(run_tiny, settings, engine, shared_engine):
    serial = run_tiny(*settings, output="serial")
    found = run_tiny(*settings, f"engine.name={engine}", "engine.nodes=2", output=engine)
    assert_same_run(found, serial, ids=engine != "flower")


REMEMBERING = ("mf", "metamf", "gpfedrec", "fedgnn", "dpvae, sound", "dpsgd")
"""Systems whose server, clients or budgets remember earlier rounds; contracts resume all others."""


@pytest.mark.slow
@pytest.mark.parametrize("system", REMEMBERING)
def test_a_broken_run_ends_as_an_unbroken_one(run_tiny, system):
    """Round 3 is repeated from the checkpoint of round 2; its uploads are the same, and count
    once."""
    settings = (*SYSTEMS[system], "rounds=4", "sampler.cohort=12", "checkpoint.every=2")
    whole = run_tiny(*settings, output="whole")
    assert_same_run(resumed(run_tiny, *settings, after=3), whole)
    if (whole.folder / "epsilons.csv").exists():
        uploads = pd.read_csv(whole.folder / "epsilons.csv")["uploads"]
        assert uploads.sum() == whole.rounds["num-clients"].sum() > 24


@pytest.mark.parametrize("settings", [TRANSITIONS, DP_TRANSITIONS], ids=["plain", "private"])
def test_transitions_are_sent_once_by_a_broken_run_too(run_tiny, settings):
    whole = run_tiny(*settings, output="whole")
    assert_same_run(resumed(run_tiny, *settings, after=1), whole)


def test_attackers_see_the_scores_that_users_are_ranked_by(run_metamf):
    """The lists behind users.csv follow from the server's parameters in a checkpoint."""
    experiment, folder = (result := run_metamf()).experiment, result.folder
    population = Population.of(experiment)
    users = result.users.index.to_numpy()
    ((_, scores),) = TrainedSystem(experiment, RunFolder(folder), users).scores(users)
    held_out = population.held_out(users, "test")
    masks = {
        name: torch.from_numpy(getattr(held_out, name)) for name in ("seen", "known", "relevant")
    }
    found = ranking_metrics(torch.from_numpy(scores), **masks, ks=(5,))
    np.testing.assert_allclose(found["hits@5"], result.users["hits@5"].to_numpy())
