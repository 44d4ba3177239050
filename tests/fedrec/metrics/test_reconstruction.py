# SPDX-License-Identifier: Apache-2.0
"""The whole-history metrics against the paper's example and loops, and their separation from
held-out metrics."""

import math

import numpy as np
import pytest
import torch

from fedrec.evaluation.metrics import Metrics
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.block import RankedBlock


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
    settings = (
        "split={name='ratio'}",
        "evaluation.baselines=['popularity']",
        "evaluation.protocol=reconstruction",
    )
    result = run_tiny(*settings, "evaluation.fine-tune={epochs=0}")
    names = [
        *result.metrics,
        *result.users.columns,
        *result.baselines["popularity"],
        *result.groups.columns,
    ]
    measures = [name for name in names if "@" in name or name == "mrr"]
    assert measures and all(name.startswith("reconstruction-") for name in measures)
    assert result.metrics["reconstruction-recall@5"] > 0
