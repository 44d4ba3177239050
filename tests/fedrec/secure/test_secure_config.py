# SPDX-License-Identifier: Apache-2.0
"""The settings of secure aggregation, and the number of nodes that a sum needs."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import SecureAggregationConfig


@pytest.mark.parametrize("given_", [True, {}, {"least-nodes": 2}])
def test_true_is_a_table_of_defaults(tiny_experiment, given_):
    experiment = load({**tiny_experiment(), "secure-aggregation": given_})
    assert experiment.secure_aggregation == SecureAggregationConfig()
    assert (
        load(tiny_experiment(), ["secure-aggregation=true"]).secure_aggregation
        == SecureAggregationConfig()
    )


def test_it_is_off_by_default_and_not_mentioned(tiny_experiment):
    assert not load({**tiny_experiment(), "secure-aggregation": False}).secure_aggregation
    assert load(tiny_experiment()).secure_aggregation is None
    assert "secure-aggregation" not in load(tiny_experiment()).table()


def test_settings_survive_every_form_that_an_experiment_travels_in(tiny_experiment):
    one = load(
        tiny_experiment(), ["secure-aggregation.threshold=0.8", "secure-aggregation.largest=100.0"]
    )
    assert one.secure_aggregation == SecureAggregationConfig(threshold=0.8, largest=100.0)
    assert load(one.table()) == one
    assert Experiment.parse(json.loads(one.model_dump_json())) == one
    assert Experiment.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"treshold": 0.7}, "'secure-aggregation.treshold'(.*\n)*.*did you mean 'threshold'"),
        ({"threshold": 0.5}, "secure-aggregation.threshold"),
        ({"threshold": 1.1}, "secure-aggregation.threshold"),
        ({"least-nodes": 1}, "secure-aggregation.least-nodes"),
        ({"largest": 0.0}, "secure-aggregation.largest"),
        ("yes", "secure-aggregation"),
    ],
)
def test_wrong_settings_are_named(tiny_experiment, given_, told):
    with pytest.raises(ExperimentError, match=told):
        load({**tiny_experiment(), "secure-aggregation": given_})


def test_two_thirds_rounded_up_and_never_half():
    settings = SecureAggregationConfig()
    assert [settings.quorum(nodes) for nodes in (1, 2, 3, 4, 5, 6, 8, 9, 100)] == [
        2,
        2,
        2,
        3,
        4,
        4,
        6,
        6,
        67,
    ]
    assert SecureAggregationConfig(least_nodes=5).quorum(3) == 5
    assert SecureAggregationConfig(threshold=1).quorum(7) == 7


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(2, 1000), st.floats(0.5, 1, exclude_min=True))
def test_two_quorums_always_meet(nodes, share):
    quorum = SecureAggregationConfig(threshold=share).quorum(nodes)
    assert 2 * quorum > nodes and quorum <= nodes and quorum > share * nodes - 1e-9
