# SPDX-License-Identifier: Apache-2.0
"""The same numbers on a GPU; skipped where there is none."""

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from tests.runs import parameters_in
from tests.systems import SAME, SYSTEMS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TRAINING = ("step.epochs=3", "step.learning-rate=0.2", "step.batch-size=4", "model.activation=tanh")
STEPS = {
    "plain": [],
    "everything": ["step.momentum=0.5", "step.weight-decay=0.05", "step.proximal-mu=0.3"],
    "late": ["step.late-parameters=['item.*']", "step.rates={'item.id' = 3.0}"],
    "biases": ["model.item-bias=true"],
}
VAE = ("model={name='vae', hidden=6, latent=3}", "sampler.cohort=12")
RUNS = {
    "privrec": (),
    "protected": ("privacy={clip-norm=0.5, noise-multiplier=1.0, delta=1e-3}",),
    "vae": (*VAE, *SAME, "step={name='vae', epochs=2}"),
    **{name: SYSTEMS[name] for name in ("metamf", "mf", "dpvae, sound")},
}


@pytest.fixture
def sums(load_tiny, first_sums):
    """A node's sums after a round of the tiny experiment with overrides, as whole arrays."""
    return lambda *overrides: first_sums(Node(load_tiny(*overrides), 0, 1, None))[0]


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("case", STEPS)
def test_sums_are_those_of_the_processor(sums, case, path):
    wanted = sums("engine.path=reference", *TRAINING, *STEPS[case])
    found = sums("engine.device=cuda", f"engine.path={path}", *TRAINING, *STEPS[case])
    for name, value in wanted.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-4, atol=2e-6 * max(1.0, np.abs(value).max())
        )


@pytest.mark.parametrize("case", STEPS)
def test_bf16_is_near(sums, case):
    wanted = sums("engine.path=reference", *TRAINING, *STEPS[case])
    found = sums("engine.device=cuda", "engine.precision=bf16", *TRAINING, *STEPS[case])
    for name, value in wanted.items():
        assert 0 < np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 0.05, name


@pytest.mark.parametrize("case", RUNS)
def test_whole_runs_are_those_of_the_processor(run_tiny, case):
    wanted = run_tiny(*RUNS[case], output="cpu")
    found = run_tiny(*RUNS[case], "engine.device=cuda", output="cuda")
    for name, value in parameters_in(wanted.folder).items():
        np.testing.assert_allclose(parameters_in(found.folder)[name], value, rtol=1e-3, atol=1e-5)
