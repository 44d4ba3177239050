# SPDX-License-Identifier: Apache-2.0
"""Whole runs under secure aggregation: the same numbers as without it, on every engine; impossible
combinations are refused."""

import numpy as np
import pytest

from fedrec.errors import ClientError, ExperimentError
from tests.runs import assert_close, resumed
from tests.systems import SYSTEMS

SECURE = "secure-aggregation=true"
THREE = "engine.nodes=3"
QUICK = ("evaluation.every=0", "evaluation.final-users=1", "evaluation.fine-tune={epochs=0}")
PLANS = {
    "none": (),
    "weighted": ("strategy.name=fedavg",),
    "central": ("privacy={clip-norm=0.5, noise-multiplier=1.0}",),
    "distributed": (
        "privacy={clip-norm=0.5, noise-multiplier=1.0, placement='distributed', max-dropouts=2}",
    ),
    "local": ("privacy={clip-norm=0.5, noise-multiplier=1.0, placement='local'}",),
    "laplace": ("privacy={clip-norm=0.5, noise-multiplier=1.0, mechanism='laplace', delta=0.0}",),
    "adaptive": ("privacy={clip-norm=0.5, noise-multiplier=1.0, adaptive-clip={count-noise=2.0}}",),
    "two phases": ("model.item-bias=true", "strategy={name='popularity-start'}", "rounds=3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_same_parameters_as_without(run_tiny, plan):
    """The float32 additions are exact here, and the step of the fixed point is far smaller."""
    plain = run_tiny(*PLANS[plan], *QUICK, THREE, output="plain")
    secure = run_tiny(*PLANS[plan], *QUICK, THREE, SECURE, output="secure")
    assert_close(secure.parameters, plain.parameters, rtol=1e-6, atol=1e-8)
    assert sum(float(np.abs(value).sum()) for value in plain.parameters.values()) > 1
    for column in ("num-clients", "num-examples", "loss"):
        if column in plain.rounds:
            np.testing.assert_allclose(secure.rounds[column], plain.rounds[column], atol=1e-5)
    if "epsilon" in plain.rounds:
        assert secure.rounds["epsilon"].tolist() == plain.rounds["epsilon"].tolist()


@pytest.mark.slow
def test_an_interrupted_run_continues(run_tiny):
    settings = (*QUICK, THREE, SECURE, "rounds=3")
    whole = run_tiny(*settings, output="whole")
    found = resumed(run_tiny, *settings, after=1)
    assert_close(found.parameters, whole.parameters, rtol=1e-6, atol=1e-8)
    assert len(found.rounds) == 3


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.ray
def test_on_ray(run_tiny, shared_engine):
    plain = run_tiny(*QUICK, THREE, output="plain")
    secure = run_tiny(*QUICK, THREE, SECURE, "engine.name=ray", output="ray")
    assert_close(secure.parameters, plain.parameters, rtol=1e-5, atol=1e-7)


REFUSED = {
    "generated": SYSTEMS["metamf"],
    "guided": SYSTEMS["gpfedrec"],
    "Flower's": ("strategy.name='flwr.serverapp.strategy:FedAvg'",),
    "median": ("strategy.name='geometric_median.strategy:GeometricMedian'",),
}


@pytest.mark.parametrize("system", REFUSED)
def test_strategies_that_look_at_single_answers_are_refused(run_tiny, system):
    with pytest.raises(ExperimentError, match="needs more than the sum"):
        run_tiny(*REFUSED[system], THREE, SECURE)


def test_one_node_is_refused(run_tiny):
    with pytest.raises(ExperimentError, match=r"needs more nodes(.*\n)*.*engine.nodes = 2"):
        run_tiny("engine.nodes=1", SECURE)


def test_a_sum_without_room_names_the_setting(run_tiny):
    with pytest.raises(ClientError, match=r"too large(.*\n)*.*secure-aggregation.largest"):
        run_tiny(*QUICK, THREE, "secure-aggregation={largest=1e-12}")
