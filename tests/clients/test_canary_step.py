# SPDX-License-Identifier: Apache-2.0
"""Canaries in the normal path of a client: their updates are fixed, and all others are
unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.steps.canary import CanaryConfig
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import torch_stream

USERS, CANARIES = 24, 6
PLAN = {"first": USERS, "count": CANARIES, "magnitude": 3.0, "examples": 50, "seed": 1}


@pytest.mark.parametrize("patterns", [["*"], ["layer0.*", "user.*"]])
def test_reserved_rows_of_all_parameters_change_no_update(tiny_experiment, patterns):
    """The model computes with its own rows, so that the reserved ones stay zero."""
    table = {**tiny_experiment(), "seed": 3}
    padded = {"name": "reserved", "base": table["model"], "rows": 12, "parameters": patterns}
    plain, wider = (Node(load({**table, "model": m}), 0, 1, None) for m in (table["model"], padded))
    some = plain.training[:4]
    room: dict[str, int] = wider.model.room  # type: ignore[attr-defined]
    found = train_clients(wider, parameters(wider), TrainOrder(1, some))
    expected = train_clients(plain, parameters(plain), TrainOrder(1, some))
    for name, value in parameters(plain).items():
        own = dense_change(expected.total[name], value)
        wide = dense_change(found.total[name], parameters(wider)[name])
        assert wide[: len(own)] == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert not wide[len(own) :].any()
        assert len(wide) - len(own) == room.get(name, 0)
    assert {"layer0.weight", "layer0.bias", "item.id"} <= set(room)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.fixture
def nodes(tiny_experiment):
    """A node with canaries and one without, of the same experiment."""

    def make(path="auto"):
        table = tiny_experiment()
        table["engine"]["path"] = path
        audited = {
            **table,
            "dataset": {"name": "canaries", "base": table["dataset"], "count": CANARIES},
            "split": {"name": "canaries", "base": table["split"], "count": CANARIES},
            "model": {"name": "reserved", "base": table["model"], "rows": CANARIES},
            "step": {**table["step"], "name": "canary", "base": "sgd", "canaries": PLAN},
        }
        return Node(load(audited), 0, 1, None), Node(load(table), 0, 1, None)

    return make


def parameters(node):
    return {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_round_is_the_plain_round_and_the_planted_rows(nodes, path, weighting):
    audited, plain = nodes(path)
    some = plain.training[:5]
    canaries = np.array([USERS, USERS + 3])
    with_them = train_clients(
        audited, parameters(audited), TrainOrder(1, np.concatenate([some, canaries]), weighting)
    )
    alone = train_clients(plain, parameters(plain), TrainOrder(1, some, weighting))
    share = 50.0 if weighting == "examples" else 1.0
    audit = {
        name: dense_change(change, parameters(audited)[name])
        for name, change in with_them.total.items()
    }
    for name, change in alone.total.items():
        total = dense_change(change, parameters(plain)[name])
        assert np.array_equal(audit[name][: len(total)], total)
    rows = audit["item.id"][-CANARIES:]
    signs = CanaryConfig.parse({"canaries": PLAN}).canaries.signs()
    expected = np.zeros((CANARIES, 4))
    for place in (0, 3):
        expected[place] = share * signs[place] * 3.0 / 2.0  # norm 3 over four entries
    assert rows == pytest.approx(expected)
    assert (with_them.clients, with_them.examples) == (alone.clients + 2, alone.examples + 100)
    assert (with_them.loss, with_them.losses) == (alone.loss, alone.losses)
    assert with_them.weight == alone.weight + 2 * share


def test_the_others_are_trained_in_blocks(nodes, monkeypatch):
    audited, _ = nodes()
    from clients.training import round

    blocks = []
    real = round.train_in_blocks
    monkeypatch.setattr(
        round, "train_in_blocks", lambda *a, **k: blocks.append(a[4].tolist()) or real(*a, **k)
    )
    train_clients(
        audited, parameters(audited), TrainOrder(1, np.array([*audited.training[:4], USERS + 1]))
    )
    assert blocks == [audited.training[:4].tolist(), [USERS + 1]]


def test_a_cohort_of_canaries_alone(nodes):
    audited, _ = nodes()
    reply = train_clients(audited, parameters(audited), TrainOrder(1, USERS + np.arange(CANARIES)))
    assert reply.clients == CANARIES and reply.losses == 0
    initial = parameters(audited)
    rest = (
        dense_change(total, initial[name])
        for name, total in reply.total.items()
        if name != "item.id"
    )
    assert not any(change.any() for change in rest)
    norms = np.linalg.norm(
        dense_change(reply.total["item.id"], parameters(audited)["item.id"]), axis=1
    )
    assert norms == pytest.approx([0.0] * 30 + [3.0] * CANARIES)


def test_settings_of_fine_tuning_reach_the_other_step(nodes):
    audited, _ = nodes()
    tuned = audited.step(audited.experiment.fine_tune_step().model_copy(update={"name": "canary"}))
    assert tuned.base.config.epochs == 1 and tuned.base.config.batch_size == 8


def test_a_wrong_setting_of_the_other_step_is_named(nodes):
    with pytest.raises(ExperimentError, match=r"step\.batch-sice"):
        CanaryConfig.parse({"canaries": PLAN, "batch-sice": 4}, at="step")


def test_a_model_without_reserved_rows_is_refused(nodes):
    audited, _ = nodes()
    step = audited.step(audited.experiment.step)
    step.model = step.model.base
    with pytest.raises(ExperimentError, match="no room for canaries"):
        update_of(
            step, {"w": torch.zeros(2)}, audited.population.client(USERS), np.random.default_rng(0)
        )


def test_what_stays_on_the_device_is_what_the_other_step_keeps(nodes):
    audited, _ = nodes()
    section = audited.experiment.step
    assert audited.step(section).keeps is False
    step = audited.step(
        type(section).model_validate({**section.model_dump(), "private-parameters": ["w"]})
    )
    assert step.keeps is True and step.private_names(["w", "v"]) == ["w"]
