# SPDX-License-Identifier: Apache-2.0
"""Private state stays private, gradients are autograd's, and the evaluation does not leak the
held-out item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pfedrec.model import LinearScore
from pfedrec.step import BIAS, ITEMS, WEIGHT, DualPersonal
from pfedrec.strategy import SharedItems
from torch.nn import functional as F

from clients.blocks import update_of
from clients.node import Node
from clients.storage import PrivateState
from fedrec.components.registry import STEP
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.schema import load
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.contracts.training import ModelContract, StepContract, StrategyContract

EXPERIMENT = Path(__file__).resolve().parent.parent / "experiment.toml"
SMALL = [
    "dataset.users=40",
    "dataset.items=60",
    "sampler.cohort=20",
    "evaluation.baselines=[]",
    "rounds=3",
]
MODEL = {"model": {"name": "pfedrec.model:LinearScore", "embedding": 4}}


class TestModel(ModelContract):
    component = LinearScore
    settings = {"embedding": 4}


class TestStep(StepContract):
    component = DualPersonal
    experiment = MODEL
    settings = {"epochs": 2}


class TestStrategy(StrategyContract):
    component = SharedItems
    experiment = {**MODEL, "step": {"name": "pfedrec.step:DualPersonal", "epochs": 1}}


@pytest.fixture
def node():
    return Node(load(EXPERIMENT, [*SMALL, "step.batch-size=100000"]), 0, 1, None)


def test_one_epoch_is_autograds(node):
    """Score function first, with items held; then items, under the new score function."""
    step = node.step(node.experiment.step.model_copy(update={"epochs": 1}))
    data = node.population.client(3)
    step = DualPersonal(step.config.model_copy(update={"epochs": 1}), node.model, node.device)
    start = node.initial()
    update = update_of(step, start, data, stream(0, "client", 3, 1))
    items, labels = step._examples(data, stream(0, "client", 3, 1))
    items = torch.from_numpy(items)
    labels = torch.from_numpy(labels)

    def loss(values):
        predicted = node.model.predict({n: v[None] for n, v in values.items()}, (), items[None])[0]
        return F.binary_cross_entropy_with_logits(predicted, labels)

    values = {name: value.clone().requires_grad_() for name, value in start.items()}
    gradients = torch.autograd.grad(loss(values), [values[WEIGHT], values[BIAS]])
    moved = {
        n: (values[n] - 0.1 * g).detach() for n, g in zip((WEIGHT, BIAS), gradients, strict=True)
    }
    (gradient,) = torch.autograd.grad(loss({**values, **moved}), [values[ITEMS]])
    expected = {n: moved[n] - start[n] for n in moved} | {
        ITEMS: -0.1 * step.config.item_rate * gradient
    }
    for name, value in expected.items():
        torch.testing.assert_close(update.delta[name], value, rtol=1e-4, atol=1e-6)


def test_the_score_function_never_leaves_the_device(tmp_path):
    """Global score parameters stay as they were drawn; each client's own are on its node, and
    differ."""
    result = runner.run(EXPERIMENT, [*SMALL, "sampler.cohort=40"], output=tmp_path / "run")
    start = Node(result.experiment, 0, 1, None).initial()
    for name in (WEIGHT, BIAS):
        assert np.array_equal(result.parameters[name], start[name].numpy())
    assert not np.array_equal(result.parameters[ITEMS], start[ITEMS].numpy())
    state = PrivateState(tmp_path / "run" / "private" / "node-0.sqlite")
    own = [state.load(client, 99) for client in range(4)]
    assert all(set(arrays) == {WEIGHT, BIAS} for arrays in own)
    assert not np.array_equal(own[0][WEIGHT], own[1][WEIGHT])
    assert RunFolder(tmp_path / "run").status()["state"] == "finished"


class Telling(DualPersonal):
    """Keeps nothing to itself."""

    private = ()


def test_a_client_that_sends_its_score_function_is_refused(tmp_path):
    with pytest.raises(ClientError, match="a client sent 'score"):
        runner.run(EXPERIMENT, [*SMALL, f"step.name={__name__}:Telling"], output=tmp_path / "run")


def test_another_model_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="trains a linear score function"):
        runner.run(EXPERIMENT, [*SMALL, "model.name=privrec"], output=tmp_path / "run")


def touches(node, rounds, monkeypatch, leaking):
    """How often each client's updates moved each item's row, `[clients, items]`."""
    from pfedrec import step as module

    population = node.population
    honest = module.draw_negatives
    counts = np.zeros((len(node.training), population.interactions.num_items), dtype=int)
    settings = node.experiment.settings(STEP).model_copy(update={"epochs": 1, "negatives": 1})
    step = DualPersonal(settings, node.model, node.device)
    start = node.initial()
    for place, client in enumerate(node.training.tolist()):
        everything = np.unique(
            population.interactions.items[population.interactions.rows_of(client)]
        )
        if leaking:  # as in the paper's public code: held-out items never become negatives
            monkeypatch.setattr(
                module, "draw_negatives", lambda own, *rest, avoid=everything: honest(avoid, *rest)
            )
        for number in range(1, rounds + 1):
            delta = update_of(
                step, start, population.client(client), stream(0, "client", client, number)
            ).delta[ITEMS]
            counts[place] += delta.any(1).numpy()
    monkeypatch.setattr(module, "draw_negatives", honest)
    return counts


@pytest.mark.parametrize("leaking", [False, True])
def test_touched_rows_do_not_reveal_the_held_out_item(node, monkeypatch, leaking):
    """Ranked by how seldom it was touched, the test item stands where chance puts it; in the
    leaking protocol it is first among the unseen items every time, without anything having been
    learned."""
    counts = touches(node, 40, monkeypatch, leaking)
    population = node.population
    places = []
    for row, client in zip(counts, node.training.tolist(), strict=True):
        held_out = population.held_out(np.array([client]), "test")
        validation = population.held_out(np.array([client]), "validation").relevant[0]
        unseen = ~held_out.known[0] & ~validation
        (test,) = np.flatnonzero(held_out.relevant[0])
        others = row[unseen & (np.arange(len(row)) != test)]
        places.append((np.sum(others < row[test]) + np.sum(others == row[test]) / 2) / len(others))
    if leaking:
        assert np.mean(places) < 0.02
    else:
        assert abs(np.mean(places) - 0.5) < 4 * np.sqrt(1 / 12 / len(places))


def test_it_ranks_all_items_and_hides_only_what_is_known(tmp_path):
    """fedrec's protocol: a user's list is made of the whole catalogue without its training
    items."""
    result = runner.run(EXPERIMENT, SMALL, output=tmp_path / "run")
    node = Node(result.experiment, 0, 1, tmp_path / "run" / "private")
    held_out = node.population.held_out(node.evaluated, "test")
    assert (held_out.relevant.sum(1) == 1).all() and not (held_out.relevant & held_out.known).any()
    assert len(result.users) == len(node.evaluated) == 40
