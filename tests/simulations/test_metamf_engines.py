# SPDX-License-Identifier: Apache-2.0
"""Generated and private parameters on all engines, and in interrupted runs: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.data.population import Population
from fedrec.evaluation.lists import ranking_metrics
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from simulations import runner
from simulations.attacks.system import System

SAME = ("split={name='ratio'}", "evaluation.fine-tune={epochs=0}")
METAMF = (
    "model={name='metamf', user=4, memory=5, generator=8, embedding=4, rank=2, hidden=3}",
    "step={name='metamf'}",
    "strategy={name='metamf', server-lr=0.02}",
    *SAME,
)
MF = (
    "model={name='mf', factors=3}",
    "step={name='sgd', epochs=2, private-parameters=['user.*'], late-parameters=['item.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
GUIDED = (
    "model={name='gpfedrec', embedding=4, hidden=[6]}",
    "step={name='gpfedrec', batch-size=8, learning-rate=0.5}",
    "strategy={name='gpfedrec', server-lr=0.05, neighbours=3}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)
GRAPH = (
    "model={name='fedgnn', embedding=4}",
    "step={name='fedgnn', pseudo=3, noise=0.001, user-rate=0.5}",
    "strategy={name='fedgnn', server-lr=0.05, neighbours=3, history=6}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)
NCF = (
    "model={name='neumf', factors=2, tower=[4, 3]}",
    "step={name='sgd', private-parameters=['user.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
SCORED = (
    "model={name='pfedrec', embedding=4}",
    "step={name='pfedrec', batch-size=8}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
ADDED = (
    "model={name='fedrap', embedding=4}",
    "step={name='fedrap', batch-size=8, decay=0.9}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
SYSTEMS = {
    "metamf": METAMF,
    "mf": MF,
    "fedncf": NCF,
    "pfedrec": SCORED,
    "fedrap": ADDED,
    "gpfedrec": GUIDED,
    "fedgnn": GRAPH,
}


@pytest.fixture
def run_metamf(run_tiny):
    return lambda *more, **others: run_tiny(*METAMF, *more, **others)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "flower")]
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_an_engine_gives_the_serial_engines_numbers(
    run_tiny, saved_parameters, system, engine, shared_engine
):
    serial = run_tiny(*SYSTEMS[system], output="serial")
    other = run_tiny(*SYSTEMS[system], f"engine.name={engine}", output=engine)
    got, expected = saved_parameters(other.folder), saved_parameters(serial.folder)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    for name in ("rounds.csv", "users.csv", "groups.csv"):
        assert (other.folder / name).read_bytes() == (serial.folder / name).read_bytes()


class StopsInRound(Callback):
    """Interrupts after round 2, whose checkpoint is not written yet."""

    def on_update(self, round_number, before, after):
        if round_number == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "settings",
    [*SYSTEMS.values(), (*METAMF, "strategy.optimiser=sgd", "strategy.momentum=0.5")],
    ids=[*SYSTEMS, "metamf with momentum"],
)
def test_a_broken_run_ends_as_an_unbroken_one(run_tiny, saved_parameters, tmp_path, settings):
    settings = (*settings, "rounds=4", "sampler.cohort=12")
    whole = run_tiny(*settings, output="whole")
    with pytest.raises(KeyboardInterrupt):
        run_tiny(*settings, output="broken", callbacks=[StopsInRound()])
    runner.resume(tmp_path / "broken")
    got, expected = saved_parameters(tmp_path / "broken"), saved_parameters(whole.folder)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    for name in ("rounds.csv", "users.csv"):
        assert (tmp_path / "broken" / name).read_bytes() == (whole.folder / name).read_bytes()


@pytest.mark.parametrize("system", ["metamf", "gpfedrec", "fedgnn"])
def test_blocks_give_the_numbers_of_the_reference(run_tiny, saved_parameters, system):
    settings = (*SYSTEMS[system], "rounds=3")
    fast = run_tiny(*settings, output="fast")
    slow = run_tiny(*settings, "engine.path=reference", output="slow")
    got, expected = saved_parameters(fast.folder), saved_parameters(slow.folder)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)
    assert fast.metrics == pytest.approx(slow.metrics, abs=1e-6)


def test_attackers_see_the_scores_that_users_are_ranked_by(run_metamf):
    """The lists behind users.csv follow from the server's parameters in a checkpoint."""
    experiment, folder = (result := run_metamf()).experiment, result.folder
    population = Population.of(experiment)
    users = result.users.index.to_numpy()
    ((_, scores),) = System(experiment, RunFolder(folder), users).scores(users)
    held_out = population.held_out(users, "test")
    masks = {
        name: torch.from_numpy(getattr(held_out, name)) for name in ("seen", "known", "relevant")
    }
    found = ranking_metrics(torch.from_numpy(scores), **masks, ks=(5,))
    np.testing.assert_allclose(found["hits@5"], result.users["hits@5"].to_numpy())
