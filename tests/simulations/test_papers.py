# SPDX-License-Identifier: Apache-2.0
"""Reproduced papers and their measures."""

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, ttest_1samp

from fedrec.errors import ClientError, ExperimentError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.loading import load
from fedrec.privacy.plan import Plan
from simulations import runner
from simulations.reproduce import dp_vae
from simulations.reproduce.recorded import NOT_HERE, find, published, studies
from simulations.studies.declaration import TaskJob
from simulations.studies.runs import folder_of, gap, run_study, selected
from simulations.studies.tables import comparison, write

QUICK = """
    privrec table5, dp-vae table10, targeted-dp figure2, privrec figure4,
    privrec figure5, privrec figure9, targeted-dp figure4, upc-sdg figure4,
    privrec figure2, dp-vae table2, upc-sdg table1, dp-vae noise, dp-vae popularity, dp-vae whole,
    dp-vae p-min, dp-vae fitted, dp-vae scale-popularity, adversaries privrec,
    adversaries privrec-video, adversaries mf, adversaries mf-movielens, adversaries sums,
    adversaries sums-video, adversaries fold-in, adversaries
    fold-in-video, adversaries pnbm, adversaries pnbm-movielens, adversaries
    pnbm-movielens-clip, adversaries pnbm-video
"""
LONG = """
    dp-vae figure3, privrec figure6, privrec figure7, upc-sdg figure2, privrec frontier, privrec
    table2, privrec table6, pnbm figure1, pnbm figure1-ml1m, dp-vae table8, upc-sdg table2, upc-sdg
    table2-gowalla, dp-vae scale
"""


def names_in(text):
    return [" ".join(name.split()) for name in text.split(",")]


def done(name, path, only=""):
    (study,) = find(*name.split())
    folder = folder_of(study, path, quick=True)
    jobs = selected(study.jobs(folder.path, 1, quick=True), only)
    failures = run_study(folder, jobs)
    assert not failures
    printed = published(study.paper, study.item, study.published)
    write(study, folder.path, jobs, printed, quick=True)
    return study, [one for job in jobs for one in job.results()[0]]


def loaded(paper, item, name, seed=0):
    """The experiment of a task."""
    (study,) = find(paper, item)
    (task,) = (task for task in study.tasks if task.name == name)
    job = TaskJob(None, seed, False, task)
    return job.experiment(task.options["experiment"], task.options.get("set", ()))


def changed(one, other):
    """The keys in which two experiments' sections differ."""
    sections = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    sections -= {"name", "title", "settings-tried"}
    return {
        f"{section}.{key}"
        for section in sections
        for key in one[section].keys() | other[section].keys()
        if one[section].get(key) != other[section].get(key)
    }


@pytest.mark.parametrize(
    "name",
    [*names_in(QUICK), *(pytest.param(name, marks=pytest.mark.slow) for name in names_in(LONG))],
)
def test_a_study_runs_small_and_fills_rows_of_the_papers_table(name, tmp_path, monkeypatch):
    """On synthetic data, without a data directory; the resulting rows are rows of the paper."""
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "none"))
    study, found = done(name, tmp_path / "study")
    printed = published(study.paper, study.item, study.published)
    assert found and all(not math.isnan(one.value) for one in found)
    if printed:
        assert {one.cell for one in found} & printed.keys()
    table = comparison(printed, found)
    assert len(table) >= len(printed)
    assert table["ours"].notna().sum() == len({f.cell for f in found})
    assert study.title in (tmp_path / "study" / f"{study.item}.md").read_text()


def test_the_epsilons_of_table_4_come_out_as_printed(tmp_path):
    study, found = done("privrec table4", tmp_path)
    table = comparison(published(study.paper, study.item), found)
    ours = table[(table["model"] == "DP-PrivRec") & table["ours"].notna()]
    assert list(ours["ours"]) == pytest.approx(list(ours["published"]), abs=1e-4)
    assert len(ours) == 4 and math.isinf(ours["ours"].iloc[0])
    counted = table[table["model"].str.startswith("each round") & np.isfinite(table["ours"])]
    assert (counted["ours"] < 1.75).all() and len(counted) == 6


def test_the_network_of_dp_vae_is_the_printed_one_but_for_the_items(tmp_path):
    """Its parameters in closed form, for the items of the synthetic data and of MovieLens-100K."""

    def parameters(items, hidden=80, latent=20):
        outer = 2 * items * hidden + items + hidden
        return outer + 3 * hidden * latent + 2 * latent + hidden

    study, found = done("dp-vae table3", tmp_path)
    printed = published(study.paper, study.item)["ML-100K", "VAE", "parameters"]
    assert parameters(1682) == printed
    ours = {one.metric: one.value for one in found}
    assert ours["parameters"] == parameters(50) and ours["latent dimension"] == 20


def test_every_table_and_figure_of_the_papers_is_made_or_has_a_reason():
    """Numbers of tables and figures as the papers count them."""
    counted = {
        "privrec": {"table": 6, "figure": 9},
        "dp-vae": {"table": 11, "figure": 3},
        "targeted-dp": {"figure": 4},
        "pnbm": {"figure": 3},
        "upc-sdg": {"table": 3, "figure": 4},
    }
    items = {
        f"{paper} {kind}{number}"
        for paper, kinds in counted.items()
        for kind, count in kinds.items()
        for number in range(1, count + 1)
    }
    made = {study.name.partition("-ml1m")[0].partition("-gowalla")[0] for study in studies()}
    assert made >= items - NOT_HERE.keys() and not made & NOT_HERE.keys()
    ours = {study.name for study in studies() if study.title.startswith("Ours: ")}
    assert made - items == ours and NOT_HERE.keys() <= items


@pytest.mark.parametrize("study", list(studies()), ids=lambda study: study.name)
def test_a_study_has_tasks_with_names_of_their_own_and_compares_rows_that_it_has(study):
    names = [task.name for task in study.tasks]
    assert len(set(names)) == len(names) and any(task.sample for task in study.tasks)
    assert study.seconds(study.seeds) > 0
    rows = {task.options.get("row") for task in study.tasks}
    rows |= {row for task in study.tasks for row in task.options.get("rows", {}).values()}
    assert {row for pair in study.compared for row in pair} <= rows


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("privrek", None), "did you mean 'privrec'"),
        (("privrec", "tabel2"), "did you mean 'table2'"),
        (("dp-vae", "table5"), "ML-20M and Netflix"),
    ],
)
def test_missing_studies_are_reported_with_the_reason(asked, words):
    with pytest.raises(ExperimentError) as refused:
        find(*asked)
    assert words in refused.value.text()


@pytest.mark.parametrize(
    ("item", "before", "after", "keys"),
    [
        ("noise", "constant", "constant-priors", {"step.priors"}),
        ("noise", "constant", "optimal", {"step.mode"}),
        ("noise", "constant", "optimal-priors", {"step.mode", "step.priors"}),
        ("table11", "svd-dp", "svd-dp-o", {"step.mode"}),
        ("table11", "mf-dp", "mf-dp-o", {"step.mode"}),
        ("table11", "ae-dp", "ae-fresh", {"step.learning-rate"}),
        ("federated", "vae", "vae-no-divergence", {"step.beta"}),
        ("budgets", "tamed-0.3", "tamed-1.5", {"step.epsilon"}),
    ],
)
def test_what_dp_vae_compares_differs_in_nothing_else(item, before, after, keys):
    found = [loaded("dp-vae", item, name).table() for name in (before, after)]
    assert changed(*found) == keys


def test_each_step_from_the_papers_recipe_to_ours_has_one_change_more():
    """But for the two rates, which were chosen anew for each."""
    (study,) = find("privrec", "steps")
    tables = [loaded("privrec", "steps", task.name).table() for task in study.tasks]
    rates = {"step.learning-rate", "strategy.server-lr", "evaluation.baselines"}
    assert [changed(*pair) - rates for pair in itertools.pairwise(tables)] == [
        {"step.epochs"},
        {"model.activation"},
        {"step.negatives"},
        {"step.low-rated"},
        {"step.late-parameters"},
        {"step.rates", "evaluation.fine-tune"},
        {"strategy.anneal-rounds"},
    ]
    assert tables[-1] == loaded("privrec", "table2", "privrec").table()


def test_the_shipped_phases_compose_to_the_target():
    """With all clients in every round: mu^2 = sum of 1 / z^2, and delta(epsilon) of the Gaussian
    mechanism with that mu."""
    for name, main in (("dp-privrec-one-ml1m", 1), ("dp-privrec-ml1m", 2)):
        privacy = load(name).privacy
        assert privacy is not None and privacy.epsilon is not None
        factor = privacy.noise_factor("popularity")
        mix = ((factor, 1), (1.0, main))
        plans = [
            Plan.of(
                privacy.in_phase(phase),
                "full",
                {},
                4832,
                1 + main,
                factor=privacy.noise_factor(phase),
                mix=mix,
            )
            for phase in ("popularity", *["main"] * main)
        ]
        mu = math.sqrt(sum(plan.noise_multiplier**-2 for plan in plans))
        delta = norm.cdf(mu / 2 - 5 / mu) - math.exp(5) * norm.cdf(-mu / 2 - 5 / mu)
        assert delta <= 1.001e-5 and delta == pytest.approx(1e-5, rel=0.02)


# What tasks measure beyond the metrics of a run, on small runs and by hand.


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    small = ["rounds=1", "engine.name=serial", "dataset.users=60", "dataset.items=40"]
    baselines = "['popularity', {name='dp-popularity', epsilon=20.0}]"
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
    rows = SimpleNamespace(
        mask=lambda: np.array([np.arange(400) < lengths[user] for user in (7, 9)])
    )
    population = SimpleNamespace(rows=lambda *_, **__: rows)
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
