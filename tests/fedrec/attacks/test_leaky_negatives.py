# SPDX-License-Identifier: Apache-2.0
"""The leak of held-out items through negatives: off by default, complete when enabled, and always
reported."""

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from clients.hosting.node import Node
from clients.local.examples import labelled
from fedrec.attacks.leaky_negatives import marked
from fedrec.evaluation.lists import ranking_metrics
from fedrec.experiment.loading import load
from fedrec.report.comparison import compare
from fedrec.report.formats import comparison_text
from fedrec.report.page.page import report
from fedrec.report.summary import summary_table
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.cli.experiments.sweep import _table
from simulations.sweep.execution import sweep
from simulations.sweep.plan import plan_of


def never_drawn_hits(experiment, rounds, users=None):
    """Expected Hits@10 among 99 sampled items, ranked by how rarely an item was a negative in a
    number of rounds."""
    node = Node(experiment, 0, 1, None)
    population, schema = node.population, node.population.schema()
    clients = population.evaluated_clients("test")[:users]
    scores = np.empty((len(clients), schema.num_items))
    for place, data in enumerate(population.clients(clients)):
        random = np.random.default_rng((1, data.client))
        examples = (labelled(data, schema, 4, "ignore", random) for _ in range(rounds))
        drawn = np.concatenate([items[labels == 0] for items, labels in examples])
        scores[place] = -np.bincount(drawn, minlength=schema.num_items)
    lists = population.held_out(clients, "test")
    seen, relevant = torch.from_numpy(lists.seen), torch.from_numpy(lists.relevant)
    masks = {"seen": seen, "relevant": relevant, "known": seen & ~relevant}
    return ranking_metrics(torch.from_numpy(scores), ks=(10,), sampled_items=99, **masks)[
        "hits-of-100@10"
    ]


@pytest.fixture
def table(tiny_experiment):
    def make(leaky):
        dataset = {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20}
        split = {"name": "leave-one-out", "leaky-negatives": leaky}
        return tiny_experiment() | {"dataset": dataset, "split": split}

    return make


@pytest.mark.parametrize("leaky", [False, True])
def test_undrawn_items_reveal_nothing_without_the_leak(table, leaky):
    hits = never_drawn_hits(load(table(leaky)), rounds=60)
    if leaky:
        assert hits.mean() > 0.97
    else:
        assert abs(hits.mean() - 0.1) < 4 * hits.std() / np.sqrt(len(hits)) + 0.02


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("leaky", [False, True])
def test_the_same_on_movielens(table, leaky):
    """With the draws of 100 rounds: published code leaks as much."""
    experiment = load(table(leaky) | {"dataset": {"name": "ml-100k"}, "positive-above": None})
    hits = never_drawn_hits(experiment, rounds=100, users=150)
    assert hits.mean() > 0.99 if leaky else abs(hits.mean() - 0.1) < 0.05


@pytest.fixture
def pair(table, tmp_path):
    """Two runs that differ in the leak alone."""
    popular = ["evaluation.baselines=['popularity']"]
    for on in (False, True):
        runner.run(table(on), popular, output=tmp_path / str(on))
    return [RunFolder(tmp_path / str(on)).read_result() for on in (False, True)]


def text_of(shown):
    text = io.StringIO()
    Console(width=200, file=text).print(shown)
    return text.getvalue()


def test_the_result_states_the_leak(pair):
    honest, leaky = pair
    assert marked(honest.experiment) == "tiny" and not honest.privacy
    assert marked(leaky.experiment) == "tiny [leak]" and leaky.privacy[0].startswith("LEAK")


def test_the_table_on_the_terminal_marks_the_system_once(pair):
    honest, leaky = (text_of(summary_table(result)) for result in pair)
    assert "[leak]" not in honest and leaky.count("[leak]") == leaky.count("tiny") == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "markdown", "latex"])
def test_comparisons_mark_the_system(pair, form):
    """They are tested on the same rows, so that they can be compared; the order makes no
    difference."""
    for results in (pair, pair[::-1]):
        comparison = compare(results, against="popularity")
        assert set(comparison.systems) == {"tiny", "tiny [leak]", "popularity"}
        shown = "tiny \\[leak]" if form == "markdown" else "tiny [leak]"
        assert shown in comparison_text(comparison, form)


def test_the_report_marks_the_system(pair):
    """In its head, in a warning, and in each table but those of the run without the leak alone."""
    html = report(pair)
    assert "<title>tiny, tiny [leak]</title>" in html
    assert re.search(r'class="[^"]*warn[^"]*"[^>]*>\s*tiny \[leak\]', html)
    tables = html.split("<table")[1:]
    named = [table for table in tables if "tiny" in table]
    alone = [table for table in named if "tiny [leak]" not in table]
    assert len(alone) < len(named) and all("tiny: means" in table for table in alone), alone


def test_sweeps_mark_the_runs(table, tmp_path):
    plan = plan_of(table(False) | {"rounds": 1}, vary=["split.leaky-negatives=[false, true]"])
    result = sweep(plan, tmp_path / "sweep")
    assert result.runs["leak"].tolist() == result.settings["leak"].tolist() == [False, True]
    assert text_of(_table(result)).count("[leak]") == 1
    inside = plan_of(table(True), vary=["step.learning-rate=[0.1, 0.2]"])
    assert inside.leaks({"step.learning-rate": 0.1}) and not plan.leaks({})


def test_held_out_items_stay_possible_negatives_by_default(table):
    """Without the switch a client does not get the held-out items."""
    honest, leaky = (Node(load(table(on)), 0, 1, None).population for on in (False, True))
    for mine, other in zip(
        honest.clients(honest.training_clients), leaky.clients(leaky.training_clients), strict=True
    ):
        assert mine.avoided is None and np.array_equal(mine.never_negative, mine.positives)
        held = np.setdiff1d(other.never_negative, mine.items)
        own = honest.held_out(np.array([mine.client]), "test").seen[0]
        assert np.array_equal(np.flatnonzero(own), np.union1d(held, mine.items))


def test_sampled_metrics_are_reported_with_the_full_ranking(table, tmp_path):
    """Of the system and of baselines."""
    settings = ["evaluation.sampled-items=9", "evaluation.baselines=['popularity']"]
    result = runner.run(table(False), settings, output=tmp_path / "run")
    for metrics in (result.metrics, result.baselines["popularity"]):
        assert 0 <= metrics["hits@5"] <= metrics["hits-of-10@5"] <= 1
