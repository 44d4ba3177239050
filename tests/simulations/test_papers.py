# SPDX-License-Identifier: Apache-2.0
"""Reproduced papers and their measures."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, ttest_1samp

from fedrec.errors import ClientError, ExperimentError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import load
from fedrec.privacy.plan import Plan
from simulations.reproduce import measures
from simulations.reproduce.bench import CHANCE, METRICS, PROBE, _protocol_table, never_drawn
from simulations.reproduce.recorded import NOT_HERE, find, published, recorded, studies
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
    jobs = selected(study.jobs(folder, 1, quick=True), only)
    failures = run_study(folder, jobs)
    assert not failures
    printed = published(study.paper, study.item, study.published)
    write(study, folder, jobs, printed, quick=True)
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
    assert len(pd.read_csv(tmp_path / "study" / f"{study.item}.csv")) == len(table)


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


def test_the_gap_is_the_difference_of_the_means_with_an_interval_over_users(run_tiny):
    baselines = "['popularity', {name='dp-popularity', epsilon=20.0}]"
    result = run_tiny("evaluation.users=12", f"evaluation.baselines={baselines}")
    mean, low, high = gap(result, "dp-popularity", "hits@5")
    other = result.baselines["dp-popularity"]["hits@5"]
    assert mean == pytest.approx(result.metrics["hits@5"] - other)
    # A baseline against itself has no spread; the system against it has that of its users.
    everyone = replace(result, users=result.users * 0)
    flat, under, over = gap(everyone, "popularity", "hits@5")
    assert flat == pytest.approx(-result.baselines["popularity"]["hits@5"])
    bounds = ttest_1samp(result.users["hits@5"].to_numpy(), 0).confidence_interval()
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

        monkeypatch.setattr(measures, "finished", raises)
        return list(
            measures.noisy(TaskJob(Path(), 0, False, None), "dpvae-ml100k", "data", {}, "row")
        )

    (found,) = failing(caught.value)
    assert found.metric == "diverged in round" and 1 <= found.value <= 9
    with pytest.raises(ClientError, match="fell over"):
        failing(ClientError("a client fell over"))


def test_whole_histories_over_the_best_list_of_a_hundred(monkeypatch):
    """As the ideal list always has 100 items, the perfect list of a short history scores below
    1."""
    name = f"{measures.PREFIX}ndcg@100"
    table = pd.DataFrame({name: [1.0, 0.5]}, index=[7, 9])
    lengths = {7: 2, 9: 300}
    rows = SimpleNamespace(
        mask=lambda: np.array([np.arange(400) < lengths[user] for user in (7, 9)])
    )
    population = SimpleNamespace(rows=lambda *_, **__: rows)
    node = SimpleNamespace(population=population, experiment=SimpleNamespace(rounds=1))
    monkeypatch.setattr(measures, "evaluate_clients", lambda *_: Evaluated.of_table(table))
    found = measures._whole_histories(node, {})
    best = sum(1 / math.log2(place + 2) for place in range(100))
    assert found[name] == pytest.approx(0.75)
    assert found[measures.OF_ALL] == pytest.approx((1.0 * (1 + 1 / math.log2(3)) / best + 0.5) / 2)


def test_the_papers_svd_learns_from_ratings_not_from_likes(monkeypatch, tiny_experiment):
    """Of a ranking experiment, in whose labels every row counts as liked."""
    fitted = []

    class Spy(measures.Svd):
        def fit_ratings(self, ratings):
            fitted.append(ratings.values)
            super().fit_ratings(ratings)

    monkeypatch.setattr(measures, "Svd", Spy)
    ranking = load(tiny_experiment(), ["split={name='ratio'}", "evaluation.ks=[50]"])
    job = SimpleNamespace(experiment=lambda *_: ranking, seed=0)
    (found,) = measures.predicted_ratings(job, "tiny", "data", {"recall@50": "Recall@50"}, "SVD")
    assert len(np.unique(fitted[0])) == 5 and 0 < found.value <= 1


# FedRec-Bench: an experiment for each system, a protocol that no system can change, and a probe
# that finds held-out items where they are kept out of the negatives.

STUDIES = find("bench", None)
RECORDED = {name: table for name, table in recorded().items() if name.startswith("bench/")}
LEAVE_ONE_OUT = {"name": "leave-one-out", "order": "temporal"}


def table_of(task):
    options = dict(task.options)
    overrides = [*options.get("set", []), *options.get("chosen", {}).get(options["protocol"], [])]
    names = ("table", "split", "experiment", "label")
    return _protocol_table(*(options.get(name, "") for name in names), overrides, options["tried"])


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.item)
def test_every_task_is_an_experiment_under_the_protocol(study):
    for task in study.tasks:
        experiment = load(table_of(task))
        assert experiment.dataset.name == task.options["table"]["name"]
        assert experiment.split.name == task.options["protocol"] in study.item
        assert experiment.positive_above is None and experiment.task == "ranking"
        assert experiment.evaluation.ks == (10,) and experiment.evaluation.sampled_items == 99
        assert experiment.evaluation.held_out == "test"
        if experiment.split.name == "user-holdout":
            assert experiment.split.options["folds"] == 5
        else:
            assert not experiment.split.options["leaky-negatives"]


def test_a_system_cannot_change_the_protocol(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nrounds = 2\npositive-above = 3.0\n[dataset]\nname = "ml-1m"\n'
        '[model]\nname = "mf"\n[step]\nname = "sgd"\nprivate-parameters = ["user.*"]\n'
        '[sampler]\nname = "fixed-size"\ncohort = 4\n[evaluation]\nks = [3]\n'
    )
    overrides = [
        *("split.leaky-negatives=true", "evaluation.held-out=validation", "dataset.name=ml-1m"),
        *("evaluation.final-users=9", "evaluation.masked=both", "positive-above=4.0"),
        "task=rating",
    ]
    dataset = {"name": "ml-100k"}
    file = str(tmp_path / "mine.toml")
    experiment = load(_protocol_table(dataset, LEAVE_ONE_OUT, file, "", overrides, 4))
    assert experiment.dataset.name == "ml-100k" and experiment.positive_above is None
    assert not experiment.split.options["leaky-negatives"] and experiment.task == "ranking"
    assert experiment.evaluation.held_out == "test" and experiment.evaluation.ks == (10,)
    assert experiment.evaluation.final_users is None and experiment.evaluation.masked == "real"
    assert experiment.rounds == 2 and experiment.model.name == "mf"


def test_a_study_has_all_numbers_and_bytes_of_the_arrays(tmp_path):
    """A client of FedMF gets a table of 32 factors and a bias for each item, a bias for all, and
    the start of its own, 4 bytes a number; 30 client-rounds are three quarters of a round for
    each of 40 clients. Biases are zero in the first of three rounds, its own always, and then not
    sent. The change of the items that it touches goes up, at most the same."""
    whole = next(study for study in STUDIES if study.item == "synthetic-leave-one-out")
    small = {"name": "synthetic", "users": 40, "items": 150, "mean-interactions": 12}
    fast = ["rounds=3", "sampler.cohort=10"]
    tasks = [
        replace(task, options={**task.options, "table": small, **more})
        for task in whole.tasks
        for more in ({"set": fast} if task.name == "fedmf" else {},)
        if task.name in ("fedmf", "popularity")
    ]
    study = replace(whole, tasks=tuple(tasks))
    folder = folder_of(study, tmp_path, quick=False)
    jobs = study.jobs(folder, 1, quick=False)
    assert not run_study(folder, jobs)
    numbers = {
        job.task.name: {one.metric: one for one in job.results()[0]}
        for job in jobs
        if job.results()
    }
    fedmf = numbers["fedmf"]
    assert {*METRICS, PROBE, "gap of discounted-hits@10, activity"} <= fedmf.keys()
    parameters = 150 * (32 + 1) + 1 + (32 + 1)
    zeros = 10 * (150 + 1) + 30
    assert fedmf["bytes down"].value == 4 * (parameters * 30 - zeros) / 40
    assert 0 < fedmf["bytes up"].value <= fedmf["bytes down"].value
    assert fedmf["hits@10"].inputs["client_rounds"] == 30
    assert fedmf["hits@10"].inputs["settings_tried"] == 8
    assert numbers["popularity"][PROBE].value == CHANCE
    assert not {"bytes up", "bytes down", "epsilon"} & numbers["popularity"].keys()


@pytest.mark.parametrize("name", list(RECORDED))
def test_the_probe_of_what_is_recorded_is_at_chance(name):
    """Chance is within twice its interval, or within .01."""
    for row, numbers in RECORDED[name].rows.items():
        probe = numbers[PROBE]
        half = 0.0 if np.isnan(probe.low) else probe.high - probe.mean
        assert abs(probe.mean - CHANCE) <= max(2 * half, 0.01), row


@pytest.fixture
def leaking(tiny_experiment):
    """An experiment of 40 rounds of everybody, with or without the leak."""

    def make(leaky, **changes):
        made = tiny_experiment() | {
            "dataset": {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20},
            "split": {"name": "leave-one-out", "leaky-negatives": leaky},
            "sampler": {"name": "full"},
            "rounds": 40,
        }
        made["evaluation"] = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 0}}
        return made | changes

    return make


@pytest.mark.parametrize("leaky", [False, True])
def test_undrawn_items_of_a_run_reveal_nothing_without_the_leak(leaking, leaky):
    hits = never_drawn(load(leaking(leaky)))["hits-of-100@10"]
    assert hits.mean() > 0.97 if leaky else abs(hits.mean() - 0.1) < 0.1


def test_draws_on_the_device_before_ranking_count_too(leaking):
    """Without rounds in which a user is, only fine-tuning can leak."""
    evaluation = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 1, "negatives": 200}}
    sampler = {"name": "fixed-size", "cohort": 1}
    leaky = load(leaking(True, evaluation=evaluation, sampler=sampler, rounds=1))
    assert never_drawn(leaky)["hits-of-100@10"].mean() > 0.3


def test_blocks_of_users_are_as_all_users_at_once(leaking, monkeypatch):
    whole = never_drawn(load(leaking(False, rounds=2)))
    monkeypatch.setattr("simulations.reproduce.bench._CELLS_AT_ONCE", 1000)  # four users
    parts = never_drawn(load(leaking(False, rounds=2)))
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-12)
