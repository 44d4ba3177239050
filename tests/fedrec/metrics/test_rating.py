# SPDX-License-Identifier: Apache-2.0
"""Metrics of ratings, of reconstruction and of sampled lists."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom

from fedrec.components.sections import Section
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import ROWS, Metrics, ranking_metrics
from fedrec.experiment.schema import EvaluationConfig
from fedrec.metrics.base import RatedBlock, TargetRating
from fedrec.metrics.ranks import RankedBlock

PREDICTED = np.array([3.0, 5.0, 1.0], dtype=np.float32)
ACTUAL = np.array([4.0, 2.0, 1.0], dtype=np.float32)
METRICS = Metrics("rating", EvaluationConfig())


def test_by_user_and_pooled_over_rows():
    got = METRICS.of_ratings(RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3))
    np.testing.assert_allclose(got["mae"], [2, np.nan, 0])
    np.testing.assert_allclose(got["rmse"], [5**0.5, np.nan, 0])
    assert got[ROWS].tolist() == [2, 0, 1]
    assert METRICS.means(got) == pytest.approx({"mae": 4 / 3, "rmse": (10 / 3) ** 0.5})


def test_no_rating():
    got = METRICS.of_ratings(RatedBlock(np.empty(0), np.empty(0), np.empty(0, dtype=int), 2))
    assert np.isnan(got["mae"]).all() and np.isnan(METRICS.means(got)["rmse"])


def test_predicted_ratings_of_targets_over_the_users_who_have_not_rated_them():
    targets = np.array([[4.0, 2.0], [np.nan, 5.0], [np.nan, np.nan]])
    block = RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3, targets)
    metric = TargetRating(Config())
    np.testing.assert_allclose(metric.per_user(block), [3, 5, np.nan])
    assert metric.pooled(metric.per_user(block), block.counts) == 4  # users count the same
    without = metric.per_user(RatedBlock(PREDICTED, ACTUAL, np.array([0, 0, 2]), 3))
    assert np.isnan(without).all() and np.isnan(metric.pooled(without, block.counts))


def test_faults():
    with pytest.raises(ExperimentError, match="1 NaN among 1"):
        RatedBlock(np.array([np.nan]), np.array([1.0]))
    with pytest.raises(ValueError, match="as many predictions"):
        RatedBlock(PREDICTED, ACTUAL[:2])


# The whole-history metrics against the paper's example and loops, and their separation from
# held-out metrics.


def reconstruction_metrics(scores, history, ks):
    none = torch.zeros_like(history)
    block = RankedBlock(scores, seen=history, known=none, relevant=history, ks=ks)
    settings = EvaluationConfig(ks=tuple(ks), protocol="reconstruction")
    return Metrics("ranking", settings).of_block(block)


def test_the_papers_worked_example():
    # Three places, the second one wrong: NDCG .7039 and recall 2 / 3 (section 4.1.2); its Q holds
    # at least 3 items.
    found = reconstruction_metrics(
        torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[True, False, True, True]]), [3]
    )
    assert found["reconstruction-ndcg@3"].item() == pytest.approx(1.5 / 2.1309, abs=1e-4)
    assert found["reconstruction-recall@3"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("k", [1, 4, 50])
def test_against_loops(k):
    random = np.random.default_rng(0)
    scores, history = random.standard_normal((7, 12)), random.random((7, 12)) < 0.4
    history[3] = False
    found = reconstruction_metrics(torch.from_numpy(scores), torch.from_numpy(history), [k])
    for user in range(7):
        best = np.argsort(-scores[user])[:k]
        hits, size = [history[user, item] for item in best], min(k, 12, history[user].sum())
        if not size:
            assert all(math.isnan(values[user]) for values in found.values())
            continue
        ideal = sum(1 / math.log2(place + 2) for place in range(size))
        gained = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))
        assert float(found[f"reconstruction-recall@{k}"][user]) == pytest.approx(sum(hits) / size)
        assert float(found[f"reconstruction-ndcg@{k}"][user]) == pytest.approx(gained / ideal)


def test_a_run_has_figures_of_one_kind_only(run_tiny):
    settings = ("evaluation.baselines=['popularity']", "evaluation.protocol=reconstruction")
    result = run_tiny("split={name='ratio'}", *settings, "evaluation.fine-tune={epochs=0}")
    tables = result.metrics, result.users, result.baselines["popularity"], result.groups
    names = [name for table in tables for name in table if "@" in name or name == "mrr"]
    assert names and all(name.startswith("reconstruction-") for name in names)
    assert result.metrics["reconstruction-recall@5"] > 0


# Expected metrics over sampled items, against scipy's distribution.

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


@pytest.mark.parametrize("decimals", [9, 0])
def test_they_are_those_of_the_hypergeometric_distribution(lists, decimals):
    """Of an item that is tied with others, each number of these is above it equally often."""
    lists["scores"] = lists["scores"].round(decimals=decimals)
    found = ranking_metrics(**lists, ks=(3,), sampled_items=SAMPLED)
    for user in range(USERS):
        own, free = lists["scores"][user], ~lists["seen"][user]
        places = lists["relevant"][user].nonzero()[:, 0]
        values = []
        for item in places.tolist():
            above, level = (
                int((part & free).sum()) for part in (own > own[item], own == own[item])
            )
            chance = hypergeom(int(free.sum()), np.arange(above, above + level + 1), SAMPLED)
            gained = sum(chance.pmf(j) / np.log2(j + 2) for j in range(3))
            values.append([chance.cdf(2).mean(), gained.mean()])
        wanted = np.mean(values, 0) if values else [np.nan, np.nan]
        got = [float(found[name][user]) for name in ("hits-of-10@3", "ndcg-of-10@3")]
        np.testing.assert_allclose(got, wanted, rtol=1e-9)


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
