# SPDX-License-Identifier: Apache-2.0
"""The same numbers on a GPU, and everywhere on a second device without hardware, which also counts
what the processor and a GPU would wait for each other for."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from benchmarks.contestants.shipped import initial, trained
from benchmarks.second_device import DEVICE, SecondDevice
from clients.hosting.node import Node
from fedrec.protocol.orders import TrainOrder
from tests.runs import parameters_in
from tests.systems import SYSTEMS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TRAINING = ("step.epochs=3", "step.learning-rate=0.2", "step.batch-size=8", "model.activation=tanh")
STEPS = {
    "plain": [],
    "everything": ["step.momentum=0.5", "step.weight-decay=0.05", "step.proximal-mu=0.3"],
    "late": ["step.late-parameters=['item.*']", "step.rates={'item.id' = 3.0}"],
    "biases": ["model.item-bias=true"],
}
PROTECTED = ("privacy={clip-norm=0.5, noise-multiplier=1.0, delta=1e-3}",)
# Adam would make steps of rounding: in exact arithmetic, keys' biases have a gradient of zero
SASREC = (*SYSTEMS["sasrec"], "strategy={name='fedavg'}")
# users end at different steps, and what a GPU would replay must leave them as they are
GPFEDREC = (*SYSTEMS["gpfedrec"], "step.batch-size=4", "step.epochs=4")
RUNS = {"privrec": (), "protected": PROTECTED, **SYSTEMS, "sasrec": SASREC, "gpfedrec": GPFEDREC}
QUICK = ("plain", "late")
CASES = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in STEPS]


@pytest.fixture(params=["second device", pytest.param("cuda", marks=needs_cuda)])
def elsewhere(request):
    """Returns a context in which nodes compute on another device than the processor, if they are
    made with the overrides that it yields."""

    @contextmanager
    def entered():
        if request.param == "cuda":
            yield ["engine.device=cuda"]
        else:
            place = "clients.hosting.node.resolve_device"
            with pytest.MonkeyPatch.context() as patch, SecondDevice():
                patch.setattr(place, lambda *_: DEVICE)
                yield ["engine.path=blocks"]

    return entered


@pytest.fixture
def sums(load_tiny):
    """A node's sums after a round of some clients of the tiny experiment with overrides."""

    def found(*overrides):
        node = Node(load_tiny(*TRAINING, *overrides), 0, 1, None)
        arrays = initial(node)
        return trained(node, arrays, TrainOrder(1, node.training[:3], "uniform"))[1]

    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_processor(sums, elsewhere, case):
    wanted = sums("engine.path=reference", *STEPS[case])
    with elsewhere() as overrides:
        found = sums(*overrides, *STEPS[case])
    for name, value in wanted.items():
        bound = 2e-6 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=bound)


@needs_cuda
@pytest.mark.parametrize("case", STEPS)
def test_bf16_is_near(sums, case):
    wanted = sums("engine.path=reference", *STEPS[case])
    found = sums("engine.device=cuda", "engine.precision=bf16", *STEPS[case])
    for name, value in wanted.items():
        assert 0 < np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_whole_runs_are_those_of_the_processor(run_tiny, elsewhere, case):
    wanted = run_tiny(*RUNS[case], output="processor")
    with elsewhere() as overrides:
        found = run_tiny(*RUNS[case], *overrides, output="elsewhere")
    for name, value in parameters_in(wanted.folder).items():
        np.testing.assert_allclose(parameters_in(found.folder)[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_step_of_a_block_waits(sums, monkeypatch, case):
    monkeypatch.setattr("clients.hosting.node.resolve_device", lambda *_: DEVICE)
    crossings = []
    for epochs in (5, 9):
        with SecondDevice() as device:
            sums(*STEPS[case], "engine.path=blocks", f"step.epochs={epochs}")
        crossings.append(device.crossings)
    assert crossings[0] == crossings[1] and crossings[0].total() > 0


def test_the_second_device_counts_what_is_read_back_and_copied():
    with SecondDevice() as device:
        there = torch.ones(3).to(DEVICE)
        assert float(there.sum()) == 3
        assert (there > 0).nonzero().tolist() == [[0], [1], [2]]
        there[there > 2] = 0.0
        (there * 2).cpu()
    kinds = [kind for kind, _ in device.crossings.elements()]
    assert kinds.count("copied there") == 1 and kinds.count("read back") == 5
    assert all("test_training_devices.py" in place for _, place in device.crossings)
