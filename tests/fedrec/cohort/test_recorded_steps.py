# SPDX-License-Identifier: Apache-2.0
"""Steps of a block that are recorded once and replayed."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import descend
from fedrec.cohort.recorded_steps import run_steps
from fedrec.cohort.sgd import SgdSettings
from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.mf import Mf, MfConfig


class Repeater:
    """Does again what it recorded; notes when."""

    def __init__(self):
        self.noted = []

    @contextmanager
    def entered(self):
        self.noted.append("begun")
        yield
        self.noted.append("ended")

    def record(self, work):
        self.noted.append("recorded")
        return SimpleNamespace(replay=work)


@pytest.fixture
def recorder(monkeypatch):
    made = Repeater()
    monkeypatch.setattr("fedrec.cohort.recorded_steps.recorder_of", lambda device: made)
    return made


def block_of(*counts):
    """Clients with so many steps of one example."""
    batches = [
        Batches.cut([(np.arange(count), np.ones(count, dtype=np.float32))], 1) for count in counts
    ]
    return Block.of([()] * len(counts), batches, torch.device("cpu"))


class Counting:
    """A step that adds its items to a sum of each client; notes the clients of each call."""

    def __init__(self, clients):
        self.sums = torch.zeros(clients, dtype=torch.int64)
        self.calls = []

    def __call__(self, block, step, active):
        own = block.items[step, :active, 0] + 1
        if block.training is not None:
            own = own.where(block.training[:active], 0)
        self.sums[:active] += own
        self.calls.append((active, block.number is not None))
        return own.float()


def test_every_client_takes_its_own_steps_in_their_order(recorder):
    counts = (12, 9, 9, 6, 5, 3, 1, 1)
    block, steps = block_of(*counts), Counting(8)
    losses = run_steps(block, steps)
    assert steps.sums.tolist() == [sum(range(1, count + 1)) for count in counts]
    for client, count in enumerate(counts):
        assert losses[:count, client].tolist() == list(range(1, count + 1))
    # 8, 6, 6, 5, 5 clients, then 4, 3, 3, 3; three steps of the last are not worth a recording
    assert steps.calls == [(8, True)] * 5 + [(4, True)] * 4 + [(1, False)] * 3
    assert recorder.noted == ["begun", "recorded", "recorded", "ended"]


@pytest.mark.parametrize("recorded", [True, False])
def test_steps_of_two_kinds_are_not_one_recording(recorder, recorded):
    block, steps = block_of(10, 10), Counting(2)
    run_steps(block, steps, kind=lambda step: step < 4, capturable=recorded)
    assert steps.sums.tolist() == [55, 55]
    assert recorder.noted == (["begun", *["recorded"] * 2, "ended"] if recorded else [])


class Shrinking:
    """A loss that does not depend on a client's examples, so that only their number matters."""

    capturable = True

    def __call__(self, parameters, block, step, active):
        return parameters["user.factors"].square().sum(-1)


def test_clients_who_have_ended_stay_as_they_are(recorder):
    """Each step multiplies a client's factors by the same number."""
    counts = (12, 9, 5, 1)
    model = Mf(MfConfig(factors=2), Schema(12, FeatureTable(12), (), "ranking"))
    start = model.initial(torch.Generator().manual_seed(0))
    found = descend(model, start, block_of(*counts), SgdSettings(0.1), Shrinking())
    for client, count in enumerate(counts):
        wanted = start["user.factors"] * (1 - 2 * 0.1) ** count
        torch.testing.assert_close(found.values["user.factors"][client], wanted)
    assert "recorded" in recorder.noted


def test_a_subclass_with_a_loss_of_its_own_declares_whether_it_is_capturable():
    class Other(Mf):
        def loss(self, predictions, labels, weights=None):
            return super().loss(predictions, labels, weights) * float(weights.sum())

    class Declared(Other):
        capturable = True

    found = [object.__new__(model).declared_capturable for model in (Mf, Other, Declared)]
    assert found == [True, False, True]
