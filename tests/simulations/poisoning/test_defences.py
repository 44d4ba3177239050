# SPDX-License-Identifier: Apache-2.0
"""Each robust rule stops few loud attackers, which the mean does not, and none stops a coalition as
large as the honest cohort; UNION also stops those that draw the items' embeddings together."""

import numpy as np
import pytest

from simulations import runner

BASE = {
    "name": "defences",
    "seed": 2,  # the target is at the end of lists without an attack
    "rounds": 12,
    "positive-above": 3.0,
    "dataset": {
        "name": "synthetic", "users": 120, "items": 60, "mean-interactions": 20,
        "min-interactions": 10,
    },
    "model": {"name": "privrec", "embedding": 8, "hidden": [8]},
    "sampler": {"name": "fixed-size", "cohort": 40},
    "evaluation": {"every": 0, "ks": [5], "baselines": [], "fine-tune": {"epochs": 0}},
    "engine": {"name": "serial", "nodes": 1, "threads": 1, "device": "cpu"},
}  # fmt: skip
LOUD = "adversary={attack={name='explicit-boosting',norm=50.0},share=0.025}"
CLUSTERING = "adversary={attack={name='cluster-attack',norm=20.0},share=0.1}"
MANY = "adversary={attack={name='explicit-boosting',norm=3.0},share=1.0}"
RULES = {
    "median": "{name='median'}",
    "trimmed-mean": "{name='trimmed-mean',cut=0.25}",
    "norm-bound": "{name='norm-bound'}",
    "krum": "{name='krum',malicious=0.2}",
    "multi-krum": "{name='krum',malicious=0.2,keep=20}",
    "bulyan": "{name='bulyan',malicious=0.2}",
    "union": "{name='union'}",
}


@pytest.fixture
def result(tmp_path):
    """The result of a run with a strategy against an adversary."""

    def found(strategy, adversary):
        overrides = [f"strategy={strategy}", adversary]
        return runner.run(BASE, overrides, output=tmp_path / f"{len(list(tmp_path.iterdir()))}")

    return found


@pytest.fixture
def place(result):
    """Mean place of the target in honest users' lists, as a share of their length."""
    return lambda strategy, adversary: result(strategy, adversary).metrics["target-rank"]


def mean_distance(found):
    """Mean distance between the items' embeddings, scaled to unit length."""
    table = found.parameters["item.id"]
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=2)
    return apart.sum() / (len(unit) * (len(unit) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_it_stops_few_loud_attackers_and_not_a_coalition_of_half(rule, place):
    assert place(RULES[rule], LOUD) > 0.9
    assert place(RULES[rule], MANY) < 0.05


@pytest.mark.slow
def test_the_mean_does_not_stop_few_loud_attackers(place):
    assert place("{name='reptile'}", "adversary={attack='random',share=0.0}") > 0.9
    assert place("{name='reptile'}", LOUD) < 0.05


@pytest.mark.slow
def test_union_keeps_items_apart_where_the_mean_does_not(result):
    without = mean_distance(result("{name='reptile'}", "adversary={attack='random',share=0.0}"))
    assert mean_distance(result("{name='reptile'}", CLUSTERING)) < 0.9 * without
    assert mean_distance(result(RULES["union"], CLUSTERING)) > 0.99 * without
