# SPDX-License-Identifier: Apache-2.0
"""Local training with products in bfloat16: close to float32 on both paths, and updates are
float32."""

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from fedrec.device import products_in, resolve_device
from fedrec.errors import EngineError, ExperimentError

SGD = ["step.epochs=3", "step.learning-rate=0.2", "step.batch-size=4", "model.activation=tanh"]
STEPS = {
    "plain": SGD,
    "everything": [*SGD, "step.momentum=0.5", "step.weight-decay=0.05", "step.proximal-mu=0.3"],
    "late": [*SGD, "step.late-parameters=['item.*']"],
    "vae": [
        "model={name='vae', hidden=8, latent=3}",
        "step={name='vae', epochs=3, learning-rate=0.2}",
    ],
}


@pytest.fixture
def sums(load_tiny, first_sums, tmp_path_factory):
    """A node's sums after a round in some precision, as whole arrays; without ReLU, whose sign
    rounding may change."""

    def train(precision, path, *overrides):
        experiment = load_tiny(f"engine.path={path}", *overrides)
        node = Node(experiment, 0, 1, tmp_path_factory.mktemp("node"))
        # The experiment would be refused on a CPU, but the computation is the same.
        engine = experiment.engine.model_copy(update={"precision": precision})
        node.experiment = experiment.model_copy(update={"engine": engine})
        return first_sums(node)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("case", STEPS)
def test_updates_are_near_those_of_float32(sums, case, path):
    """bfloat16 has 8 bits: a relative error of 2e-3 in each product, and somewhat more after
    several steps."""
    exact, reply = sums("float32", path, *STEPS[case])
    rough, rough_reply = sums("bf16", path, *STEPS[case])
    assert {
        change.dtype for change in rough_reply.total.values() if isinstance(change, np.ndarray)
    } == {np.dtype("f4")}
    for name, value in exact.items():
        distance = np.linalg.norm(rough[name] - value) / np.linalg.norm(value)
        assert 0 < distance < 0.05, name
    assert rough_reply.loss == pytest.approx(reply.loss, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_every_step_sees_what_the_one_before_moved(sums, case):
    """Blocks and single clients round alike, so they agree better with each other than with
    float32."""
    (blocks, _) = sums("bf16", "auto", *STEPS[case])
    (single, _) = sums("bf16", "reference", *STEPS[case])
    exact, _ = sums("float32", "reference", *STEPS[case])

    def distance(one, other):
        return sum(float(np.square(one[name] - other[name]).sum()) for name in other)

    assert distance(blocks, single) < distance(blocks, exact)


def test_a_step_that_solves_keeps_float32(sums):
    """Products that are rounded need not be positive definite."""
    als = ["model={name='ials', factors=4}", "step={name='als'}", "strategy={name='fcf'}"]
    exact, _ = sums("float32", "auto", *als)
    rough, _ = sums("bf16", "auto", *als)
    assert any(value.any() for value in exact.values())
    for name, value in exact.items():
        np.testing.assert_array_equal(rough[name], value, name)


def test_a_step_that_clips_its_own_uploads_keeps_float32(sums):
    """Rounding after the clip would not be covered by any epsilon."""
    noisy = [
        "model={name='vae', hidden=6, latent=3}",
        "step={name='dpvae', participations=2}",
        "split={name='ratio'}",
    ]
    with pytest.raises(ExperimentError, match="beyond the clip norm"):
        sums("bf16", "auto", *noisy)
    assert sums("float32", "auto", *noisy)


def test_outside_local_training_products_are_float32():
    one = torch.rand(3, 3)
    with products_in("bf16", torch.device("cpu")):
        assert torch.mm(one, one).dtype == torch.bfloat16
        with products_in("float32", torch.device("cpu")):
            assert torch.mm(one, one).dtype == torch.float32
        assert torch.mm(one, one).dtype == torch.bfloat16
    with products_in("float32", torch.device("cpu")):
        assert torch.mm(one, one).dtype == torch.float32
    assert torch.mm(one, one).dtype == torch.float32


def test_bf16_needs_cuda():
    with pytest.raises(EngineError, match=r"a CUDA device(.*\n)*.*engine.precision = 'float32'"):
        resolve_device("cpu", "bf16")
    assert resolve_device("cpu", "float32").type == "cpu"
