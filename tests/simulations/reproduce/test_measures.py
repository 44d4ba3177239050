# SPDX-License-Identifier: Apache-2.0
"""What tasks measure beyond the metrics of a run, on small runs and by hand."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from fedrec.attacks.success import Figure
from fedrec.errors import ClientError, RunError
from fedrec.evaluation.table import Evaluated
from fedrec.experiment.loading import load
from simulations import runner
from simulations.reproduce.measures import attacks, dp_vae
from simulations.study.runs import gap
from simulations.study.study import TaskJob


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    small = ["rounds=1", "engine.name=serial", "dataset.users=60", "dataset.items=40"]
    baselines = "['popularity', {name='dp-popularity', epsilon=20.0, backend='autodp'}]"
    overrides = [*small, "evaluation.every=0", f"evaluation.baselines={baselines}"]
    output = tmp_path_factory.mktemp("measures") / "run"
    return runner.run("privrec-synthetic", overrides, output=output)


def test_the_gap_is_the_difference_of_the_means_with_an_interval_over_users(result):
    mean, low, high = gap(result, "dp-popularity", "hits@20")
    other = result.baselines["dp-popularity"]["hits@20"]
    assert mean == pytest.approx(result.metrics["hits@20"] - other)
    # A baseline against itself has no spread; the system against it has that of its users.
    everyone = dataclasses.replace(result, users=result.users * 0)
    flat, under, over = gap(everyone, "popularity", "hits@20")
    assert flat == pytest.approx(-result.baselines["popularity"]["hits@20"])
    bounds = ttest_1samp(result.users["hits@20"].to_numpy(), 0).confidence_interval()
    # a triangle inequality of standard deviations
    assert 0 < high - low < over - under + 2 * (bounds[1] - bounds[0])


def test_a_gap_to_a_baseline_that_has_changed_is_refused(result):
    changed = dataclasses.replace(result, baselines={"popularity": {"hits@20": 0.5}})
    with pytest.raises(RunError, match="not what it was"):
        gap(changed, "popularity", "hits@20")


def test_a_run_that_diverges_is_a_figure_and_any_other_error_is_one(run_tiny, monkeypatch):
    step = "step={name='dpvae', mode='paper', examples=3, learning-rate=1e38}"
    model = "model={name='vae', hidden=6, latent=3}"
    with pytest.raises(ClientError) as caught:
        run_tiny(model, "split={name='ratio'}", step, "rounds=9", "evaluation.every=0")

    def failing(error):
        def raises(*_):
            raise error

        monkeypatch.setattr(dp_vae, "finished", raises)
        return list(
            dp_vae.noisy(TaskJob(Path(), 0, False, None), "dpvae-ml100k", "data", {}, "row")
        )

    (found,) = failing(caught.value)
    assert found.metric == "diverged in round" and 1 <= found.value <= 9
    with pytest.raises(ClientError, match="fell over"):
        failing(ClientError("a client fell over"))


def test_whole_histories_over_the_best_list_of_a_hundred(monkeypatch):
    """As the ideal list always has 100 items, the perfect list of a short history scores below
    1."""
    name = f"{dp_vae.PREFIX}ndcg@100"
    table = pd.DataFrame({name: [1.0, 0.5]}, index=[7, 9])
    lengths = {7: 2, 9: 300}
    population = SimpleNamespace(
        whole_history=lambda users: np.array([np.arange(400) < lengths[one] for one in users])
    )
    node = SimpleNamespace(population=population, experiment=SimpleNamespace(rounds=1))
    monkeypatch.setattr(dp_vae, "evaluate_clients", lambda *_: Evaluated.of_table(table))
    found = dp_vae.whole_histories(node, {})
    best = sum(1 / math.log2(place + 2) for place in range(100))
    assert found[name] == pytest.approx(0.75)
    assert found[dp_vae.OF_ALL] == pytest.approx((1.0 * (1 + 1 / math.log2(3)) / best + 0.5) / 2)


def test_the_papers_svd_learns_from_ratings_not_from_likes(monkeypatch, tiny_experiment):
    """Of a ranking experiment, in whose labels every row counts as liked."""
    fitted = []

    class Spy(dp_vae.Svd):
        def fit_ratings(self, ratings):
            fitted.append(ratings.values)
            super().fit_ratings(ratings)

    monkeypatch.setattr(dp_vae, "Svd", Spy)
    ranking = load(tiny_experiment(), ["split={name='ratio'}", "evaluation.ks=[50]"])
    job = SimpleNamespace(experiment=lambda *_: ranking, seed=0)
    (found,) = dp_vae.predicted_ratings(job, "tiny", "data", {"recall@50": "Recall@50"}, "SVD")
    assert len(np.unique(fitted[0])) == 5 and 0 < found.value <= 1


def test_an_attribute_of_more_than_two_groups_has_no_area_under_the_curve(monkeypatch):
    perturbed = SimpleNamespace(settings=lambda _: SimpleNamespace(attribute="age"))
    job = SimpleNamespace(experiment=lambda *_: perturbed, folder=None)

    def metrics(auc):
        found = SimpleNamespace(balanced_accuracy=Figure(0.4, 0.3, 0.5), auc=auc)
        outcome = SimpleNamespace(found=found, table={})
        monkeypatch.setattr(attacks, "run_attack", lambda *_: outcome)
        return [one.metric for one in attacks.attribute(job, "data", "experiment", "row")]

    assert metrics(None) == ["balanced accuracy"] and metrics(0.6) == ["balanced accuracy", "AUC"]
