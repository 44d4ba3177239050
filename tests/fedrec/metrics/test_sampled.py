# SPDX-License-Identifier: Apache-2.0
"""Expected metrics over sampled items, against scipy's distribution and by sampling."""

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom

from fedrec.evaluation.lists import ranking_metrics
from fedrec.evaluation.metrics import Metrics
from fedrec.experiment.sections import Section
from fedrec.experiment.tables import EvaluationConfig

USERS, ITEMS, SAMPLED = 6, 40, 9


@pytest.fixture
def lists():
    random = np.random.default_rng(0)
    scores = torch.from_numpy(random.normal(size=(USERS, ITEMS)))
    seen = torch.from_numpy(random.random((USERS, ITEMS)) < 0.3)
    relevant = seen & torch.from_numpy(random.random((USERS, ITEMS)) < 0.4)
    relevant[0] = False
    return {"scores": scores, "seen": seen, "relevant": relevant, "known": seen & ~relevant}


def test_the_number_of_items_is_a_setting_of_the_metrics():
    settings = EvaluationConfig(metrics=(Section.model_validate({"name": "hits-of", "items": 9}),))
    assert {"hits-of-10@5", "hits-of-10@30"} <= set(Metrics("ranking", settings).columns)


def test_they_are_those_of_the_hypergeometric_distribution(lists):
    found = ranking_metrics(**lists, ks=(3,), sampled_items=SAMPLED)
    for user in range(USERS):
        own, free = lists["scores"][user], ~lists["seen"][user]
        places = lists["relevant"][user].nonzero()[:, 0]
        values = []
        for item in places.tolist():
            above = int(((own > own[item]) & free).sum())
            chance = hypergeom(int(free.sum()), above, SAMPLED)
            values.append([chance.cdf(2), sum(chance.pmf(j) / np.log2(j + 2) for j in range(3))])
        wanted = np.mean(values, 0) if values else [np.nan, np.nan]
        got = [float(found[name][user]) for name in ("hits-of-10@3", "ndcg-of-10@3")]
        np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_they_are_the_mean_over_drawn_samples_ties_and_all(lists):
    """Scores of few values: the mean over many samples of the metric with random ties."""
    lists["scores"] = lists["scores"].round()
    found = ranking_metrics(**lists, ks=(3,), sampled_items=SAMPLED)["hits-of-10@3"]
    random = np.random.default_rng(1)
    for user in range(1, USERS):
        own, free = lists["scores"][user].numpy(), np.flatnonzero(~lists["seen"][user].numpy())
        hits = []
        for item in lists["relevant"][user].nonzero()[:, 0].tolist():
            for _ in range(1500):
                drawn = own[random.choice(free, SAMPLED, replace=False)]
                # level ones are ordered at random among themselves and the positive
                rank = (drawn > own[item]).sum() + random.integers((drawn == own[item]).sum() + 1)
                hits.append(rank < 3)
        assert abs(np.mean(hits) - float(found[user])) < 5 * 0.5 / np.sqrt(len(hits))


def test_a_constant_score_is_chance_and_all_items_are_the_full_ranking(lists):
    constant = lists | {"scores": torch.zeros(USERS, ITEMS)}
    found = ranking_metrics(**constant, ks=(3, 20), sampled_items=SAMPLED)
    np.testing.assert_allclose(found["hits-of-10@3"][1:], 0.3)
    np.testing.assert_allclose(found["hits-of-10@20"][1:], 1.0)
    full = ranking_metrics(**lists, ks=(3,), sampled_items=ITEMS)
    np.testing.assert_allclose(full[f"hits-of-{ITEMS + 1}@3"], full["hits@3"])
    np.testing.assert_allclose(full[f"ndcg-of-{ITEMS + 1}@3"], full["discounted-hits@3"])


def test_a_catalogue_that_is_short_for_the_name_is_told_once(lists, caplog):
    items = ITEMS + 60
    for _ in range(2):
        ranking_metrics(**lists, ks=(3, 5), sampled_items=items)
    told = [line for line in caplog.messages if f"hits-of-{items + 1} " in line]
    assert len(told) == 1 and f"the catalogue has {ITEMS}" in told[0]
    ranking_metrics(**lists, ks=(3,), sampled_items=SAMPLED)
    assert "hits-of-10 " not in caplog.text
