# SPDX-License-Identifier: Apache-2.0
"""Metrics of ranked lists."""

import itertools
import math

import ir_measures
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import AP, RR, P, R, ScoredDoc, Success, nDCG
from sklearn.metrics import ndcg_score

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import Evaluated, Metrics, ranking_metrics
from fedrec.experiment.schema import EvaluationConfig, load
from fedrec.metrics.base import Exposure, TargetRank, gini
from fedrec.metrics.ranks import RankedBlock

# Ranking metrics against ir-measures, brute force, and by hand.

KS = (1, 3, 5, 10)


def random_block(seed: int, users: int = 12, items: int = 40, levels: int | None = None):
    """Scores without ties, or with `levels` distinct values; a third seen, half of it known, half
    of the rest liked."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(users, items, dtype=torch.float64, generator=generator)
    if levels is not None:
        scores = (scores * levels).floor()
    seen = torch.rand(users, items, generator=generator) < 0.33
    known = seen & (torch.rand(users, items, generator=generator) < 0.5)
    relevant = seen & ~known & (torch.rand(users, items, generator=generator) < 0.5)
    return scores, {"seen": seen, "known": known, "relevant": relevant}


def block(scores, seen, known, relevant):
    masks = {"seen": seen, "known": known, "relevant": relevant}
    masks = {name: torch.tensor([mask], dtype=torch.bool) for name, mask in masks.items()}
    return torch.tensor([scores], dtype=torch.float64), masks


def single(scores, masks, **options) -> dict[str, float]:
    columns = ranking_metrics(scores, **masks, **options)
    return {name: values.item() for name, values in columns.items()}


def judged(measures, scores, candidates, relevant):
    """ir-measures' value of every measure for every query; arrays by query."""
    pairs = ((query, item) for query, items in candidates.items() for item in items)
    run = [ScoredDoc(query, str(item), float(scores[query][item])) for query, item in pairs]
    qrels = [ir_measures.Qrel(q, str(i), 1) for q, items in relevant.items() for i in items]
    values = ir_measures.iter_calc(measures, qrels, run)
    return {(value.query_id, str(value.measure)): value.value for value in values}


@pytest.mark.parametrize("seed", range(5))
def test_whole_lists_agree_with_ir_measures(seed):
    scores, masks = random_block(seed)
    ours = ranking_metrics(scores, **masks, ks=KS)
    users = [u for u in range(len(scores)) if masks["relevant"][u].any()]
    names = {"recall": R, "precision": P, "ndcg": nDCG, "map": AP, "hit-rate": Success}
    theirs = judged(
        [RR, *(measure @ k for measure in names.values() for k in KS)],
        {str(u): scores[u].numpy() for u in users},
        {str(u): np.flatnonzero(~masks["known"][u].numpy()) for u in users},
        {str(u): np.flatnonzero(masks["relevant"][u].numpy()) for u in users},
    )
    for u in users:
        assert ours["mrr"][u].item() == pytest.approx(theirs[str(u), "RR"], abs=1e-9)
        for name, measure in names.items():
            for k in KS:
                expected = pytest.approx(theirs[str(u), str(measure @ k)], abs=1e-9)
                assert ours[f"{name}@{k}"][u].item() == expected, (name, k, u)


@pytest.mark.parametrize("levels", [None, 6])
def test_ndcg_agrees_with_scikit_learn(levels):
    """It gives tied items their mean gain, which is what they have in expectation."""
    scores, masks = random_block(0, levels=levels)
    ours = ranking_metrics(scores, **masks, ks=KS)
    for u in range(len(scores)):
        listed = ~masks["known"][u]
        relevant = masks["relevant"][u, listed].numpy()[None]
        for k in KS:
            expected = math.nan  # theirs is 0 for a user without a held-out item
            if relevant.any():
                expected = ndcg_score(relevant, scores[u, listed].numpy()[None], k=k)
            assert ours[f"ndcg@{k}"][u].item() == pytest.approx(expected, nan_ok=True), (u, k)


@pytest.mark.parametrize("seed", range(5))
def test_single_positive_lists_agree_with_ir_measures(seed):
    """One query per held-out positive: itself against the never-seen items."""
    scores, masks = random_block(seed)
    ours = ranking_metrics(scores, **masks, ks=KS)
    pairs = masks["relevant"].nonzero().tolist()
    queries = {f"{u}-{i}": (u, i) for u, i in pairs}
    never_seen = [np.flatnonzero(~mask.numpy()) for mask in masks["seen"]]
    theirs = judged(
        [measure @ k for measure in (Success, nDCG) for k in KS],
        {q: scores[u].numpy() for q, (u, _) in queries.items()},
        {q: np.append(never_seen[u], i) for q, (u, i) in queries.items()},
        {q: np.array([i]) for q, (_, i) in queries.items()},
    )
    for u in {u for u, _ in pairs}:
        own = [q for q, (user, _) in queries.items() if user == u]
        for name, measure in (("hits", Success), ("discounted-hits", nDCG)):
            for k in KS:
                expected = np.mean([theirs[q, str(measure @ k)] for q in own])
                assert ours[f"{name}@{k}"][u].item() == pytest.approx(expected, abs=1e-9)


def all_orders(scores: torch.Tensor, masks, k: int) -> dict[str, float]:
    """Means of whole-list metrics over all orders of the catalogue, with ties by index."""
    sums: dict[str, list[float]] = {}
    for order in itertools.permutations(range(scores.shape[1])):
        value = scores[0, list(order)].numpy()
        relevant, known = (masks[name][0, list(order)].numpy() for name in ("relevant", "known"))
        candidates = np.flatnonzero(~known)
        found = relevant[candidates[np.argsort(-value[candidates], kind="stable")]]
        places = np.arange(1, len(found) + 1)
        gains = 1 / np.log2(places + 1)
        precision = found.cumsum() / places
        for name, got in {
            f"recall@{k}": found[:k].sum() / found.sum(),
            f"precision@{k}": found[:k].sum() / k,
            f"hit-rate@{k}": found[:k].any(),
            f"ndcg@{k}": (found * gains)[:k].sum() / gains[: min(k, found.sum())].sum(),
            f"map@{k}": (found * precision)[:k].sum() / found.sum(),
            "mrr": 1 / (1 + np.argmax(found)),
        }.items():
            sums.setdefault(name, []).append(got)
    return {name: float(np.mean(values)) for name, values in sums.items()}


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("scores", [[1, 1, 1, 1, 1, 1], [2, 1, 1, 1, 0, 1], [1, 2, 2, 1, 1, 2]])
def test_ties_of_whole_lists_are_the_mean_over_all_orders_of_the_catalogue(scores, k):
    found, masks = block(scores, [1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0])
    got = single(found, masks, ks=(k,))
    for name, expected in all_orders(found, masks, k).items():
        assert got[name] == pytest.approx(expected, abs=1e-12), name


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 14),
)
def test_against_sorting(seed, users, items, levels, k):
    """For any ties, catalogue and k: hits against the rank formula."""
    scores, masks = random_block(seed, users, items, levels)
    got = ranking_metrics(scores, **masks, ks=(k,))
    for u in range(users):
        value, relevant = scores[u].numpy(), np.flatnonzero(masks["relevant"][u].numpy())
        if not len(relevant):
            assert all(np.isnan(values[u]) for values in got.values())
            continue
        negatives = value[~masks["seen"][u].numpy()]
        chances = []
        for item in relevant:
            above, equal = np.sum(negatives > value[item]), np.sum(negatives == value[item])
            chances.append(np.mean([rank <= k for rank in range(above + 1, above + equal + 2)]))
        assert got[f"hits@{k}"][u].item() == pytest.approx(np.mean(chances), abs=1e-12)


def test_weights_count_a_positive_several_times():
    scores, masks = block([5, 1, 3], [1, 1, 0], [0, 0, 0], [1, 1, 0])
    assert single(scores, masks, ks=(1,), weights=torch.tensor([[3, 1, 0]]))["hits@1"] == 0.75


def test_a_known_positive_counts_in_single_lists_only():
    scores, masks = block([5, 1, 3], [1, 1, 0], [1, 0, 0], [1, 1, 0])
    got = single(scores, masks, ks=(1,))
    assert got["hits@1"] == 0.5 and got["recall@1"] == 0 and got["mrr"] == 0.5


class TestEdges:
    def test_infinite_scores_are_ranked(self):
        inf = math.inf
        scores, masks = block(
            [inf, -inf, -inf, 0, -inf], [1, 1, 0, 0, 1], [0, 0, 0, 0, 1], [1, 1, 0, 0, 0]
        )
        got = single(scores, masks, ks=(1, 2, 3))
        assert [got[f"hits@{k}"] for k in (1, 2, 3)] == [0.5, 0.75, 1]
        assert got["recall@3"] == 0.75

    def test_nan_is_an_error(self):
        with pytest.raises(ExperimentError, match="1 NaN among 2"):
            single(*block([math.nan, 1], [1, 0], [0, 0], [1, 0]))

    def test_what_does_not_fit_together_is_refused(self):
        with pytest.raises(ValueError, match="relevant item to be seen"):
            single(*block([0, 1], [1, 0], [0, 0], [0, 1]))
        scores, masks = random_block(0)
        with pytest.raises(ValueError, match="one shape"):
            ranking_metrics(scores[:3], **masks)


def test_a_masked_positive_counts_as_missed():
    """One of two held-out items is masked: recall's denominator counts both, and the list contains
    only the other."""
    scores, masks = block(
        [5.0, 4.0, 3.0, 2.0], seen=[1, 1, 1, 0], known=[1, 0, 0, 0], relevant=[0, 1, 1, 0]
    )
    masked = torch.tensor([[True, True, False, False]])
    found = single(scores, masks, ks=(2, 3), masked=masked)
    assert (found["recall@2"], found["precision@2"], found["mrr"]) == (0.5, 0.5, 1.0)
    assert found["recall@3"] == 0.5  # masked items are in no list of any length
    plain = single(scores, masks, ks=(2,))
    assert plain["recall@2"] == 1.0 and plain["hits@2"] == found["hits@2"]
    # The other way: known items that are not masked compete.
    assert single(scores, masks, ks=(1,), masked=torch.zeros_like(masked))["recall@1"] == 0.0


@pytest.mark.parametrize("levels", [None, 3000, 4])
def test_lists_of_long_catalogues_are_those_of_sorting(levels):
    scores, masks = random_block(3, users=3, items=6001, levels=levels)
    lists = RankedBlock(scores, ks=(5,), **masks).lists
    own = scores.masked_fill(masks["known"], -torch.inf)
    assert torch.equal(lists, own.sort(dim=1, descending=True, stable=True).indices[:, :5])


def measured(scores, known, liked, popularity, ks, size=100):
    """The metrics of lists, from the sums of blocks of some size."""
    metrics = Metrics("ranking", EvaluationConfig(ks=ks))
    parts = []
    for rows in torch.arange(len(scores)).split(size):
        nothing = torch.zeros_like(known[rows])
        masks = {"seen": known[rows], "known": known[rows], "relevant": nothing}
        block = RankedBlock(scores[rows], ks=ks, **masks)
        block.liked, block.popularity = liked[rows], popularity.double()
        columns = metrics.of_block(block)
        parts.append(Evaluated(rows.numpy(), columns, metrics.sums(block)))
    return metrics.of_sums(Evaluated.joined(parts).sums)


def test_lists_by_hand():
    """Lists of two of four items: 1, 3 and 0, 1; the first user knows 0 and likes it, the second
    knows and likes 3."""
    scores = torch.tensor([[9.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 9.0]])
    known = torch.tensor([[True, False, False, False], [False, False, False, True]])
    found = measured(scores, known, known, torch.tensor([0.8, 0.4, 0.2, 0.1]), (1, 2))
    assert found["coverage@1"] == 0.5 and found["coverage@2"] == 0.75
    assert found["popularity@1"] == pytest.approx((0.4 + 0.8) / 2)
    assert found["popularity@2"] == pytest.approx((0.25 + 0.6) / 2)
    assert found["popularity-lift@2"] == pytest.approx((0.25 / 0.8 - 1 + 0.6 / 0.1 - 1) / 2)
    assert found["gini@1"] == pytest.approx(0.5)
    assert found["gini@2"] == gini(np.array([1, 2, 0, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_gini_is_half_the_relative_mean_difference(seed):
    counts = np.random.default_rng(seed).integers(0, 9, 17)
    differences = np.abs(np.subtract.outer(counts, counts)).mean()
    assert gini(counts) == pytest.approx(differences / (2 * counts.mean()))
    assert math.isnan(gini(np.zeros(4)))


def test_blocks_do_not_matter_and_short_lists_are_short():
    """The last users know all items, or all but one; no list contains a known item."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 12, generator=generator)
    known = torch.rand(30, 12, generator=generator) < 0.3
    known[-2] = True
    known[-1] = True
    known[-2, 5] = False
    liked = known & (torch.rand(30, 12, generator=generator) < 0.7)
    given = (scores, known, liked, torch.rand(12, generator=generator), (3, 20))
    whole = measured(*given)
    assert whole == pytest.approx(measured(*given, size=7))
    # the whole catalogue is listed
    assert whole["gini@20"] == pytest.approx(gini((~known).sum(0).numpy()))


def test_a_user_who_likes_only_what_nobody_likes_has_no_lift():
    scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    known = torch.tensor([[False, False, True], [True, False, False]])
    found = measured(scores, known, known, torch.tensor([0.5, 0.25, 0.0]), (1,))
    assert found["popularity-lift@1"] == pytest.approx(0.25 / 0.5 - 1)


# Exposure and rank of an adversary's targets, by sorting whole lists.

SCORES = torch.tensor(
    [[3.0, 1.0, 2.0, 2.0, 0.0], [0.0, 5.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
)
KNOWN = torch.zeros(3, 5, dtype=torch.bool)
KNOWN[0, 0] = True
KNOWN[1, 1] = True
SEEN = KNOWN.clone()
SEEN[1, 2] = True  # held out: this user has rated the first target
TARGETS = torch.tensor([2, 4])


def by_all_orders(gain):
    """Mean gain of each target's place over all orders of the catalogue, in stable sorts."""
    found = np.full(3, np.nan)
    for user in range(3):
        own = [t for t in TARGETS.tolist() if not SEEN[user, t]]
        listed = [i for i in range(5) if not KNOWN[user, i]]
        gains = []
        for order in itertools.permutations(listed):
            ranked = sorted(order, key=lambda i: -float(SCORES[user, i]))
            gains.append(np.mean([gain(ranked.index(t) + 1, len(listed)) for t in own]))
        found[user] = np.mean(gains)
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_places_of_targets_by_sorting(k):
    block = RankedBlock(
        SCORES, seen=SEEN, known=KNOWN, relevant=SEEN & ~KNOWN, ks=(5,), targets=TARGETS
    )
    cases = [
        (Exposure, lambda place, _: float(place <= k)),
        (TargetRank, lambda place, length: place / length),
    ]
    for metric, gain in cases:
        found = metric(Config()).per_user(block, k).numpy()
        np.testing.assert_allclose(found, by_all_orders(gain), rtol=1e-12)


def test_a_user_who_rated_all_targets_has_no_value():
    seen = torch.ones(3, 5, dtype=torch.bool)
    block = RankedBlock(SCORES, seen=seen, known=KNOWN, relevant=~KNOWN, ks=(5,), targets=TARGETS)
    assert Exposure(Config()).per_user(block, 5).isnan().all()


def test_they_need_an_adversary(tiny_experiment):
    table = tiny_experiment()
    table["evaluation"]["metrics"] = ["exposure"]
    with pytest.raises(ExperimentError, match="adversary"):
        load(table)
