# SPDX-License-Identifier: Apache-2.0
"""Each robust rule stops few loud attackers, which the mean does not, and none stops a coalition as
large as the honest cohort."""

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
MANY = "adversary={attack={name='explicit-boosting',norm=3.0},share=1.0}"
RULES = {
    "median": "{name='median'}",
    "trimmed-mean": "{name='trimmed-mean',cut=0.25}",
    "norm-bound": "{name='norm-bound'}",
    "krum": "{name='krum',malicious=0.2}",
    "multi-krum": "{name='krum',malicious=0.2,keep=20}",
    "bulyan": "{name='bulyan',malicious=0.2}",
}


@pytest.fixture
def place(tmp_path):
    """Mean place of the target in honest users' lists, as a share of their length."""

    def measured(strategy, adversary):
        overrides = [f"strategy={strategy}", adversary]
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return runner.run(BASE, overrides, output=folder).metrics["target-rank"]

    return measured


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_it_stops_few_loud_attackers_and_not_a_coalition_of_half(rule, place):
    assert place(RULES[rule], LOUD) > 0.9
    assert place(RULES[rule], MANY) < 0.05


@pytest.mark.slow
def test_the_mean_does_not_stop_few_loud_attackers(place):
    assert place("{name='reptile'}", "adversary={attack='random',share=0.0}") > 0.9
    assert place("{name='reptile'}", LOUD) < 0.05
