# SPDX-License-Identifier: Apache-2.0
"""Private choices of a setting: what they charge is what one user can change, all trials have one
split, and what is published tells neither the number of the trial nor the cost of one."""

import json
import re
import shutil

import numpy as np
import pytest

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.report.page.sections import report
from fedrec.report.privacy_total import total_of
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from simulations.studies.sweep import SweepFolder, plan_of, sweep, with_sweeps

VALIDATION = ["evaluation.held-out=validation", "split.validation-users=0.25"]
RATES = "strategy.server-lr=[0.1, 1.0]"
PRIVATE = "privacy={clip-norm=1.0, noise-multiplier=1.0, delta=1e-5, backend='pld'}"
HELD_OUT = [*VALIDATION, "rounds=2", PRIVATE]


@pytest.fixture
def plan(tiny_experiment):
    """Plans a sweep of the tiny experiment."""
    return lambda fixed=(), vary=(RATES,), **more: plan_of(tiny_experiment(), fixed, vary, **more)


def privately(plan, fixed=HELD_OUT, aim="hits@5", **more):
    return plan(fixed, choose=[aim], private="geometric", trials=3, **more)


def cost(asked):
    return asked.cost


def test_a_private_choice_costs_what_dp_accounting_says_before_anything_runs(plan):
    """All clients in each of 2 rounds: Gaussian noise of multiplier 1, of which the best of a
    geometric number of trials is published."""
    event = pytest.importorskip("dp_accounting.dp_event")
    rdp = pytest.importorskip("dp_accounting.rdp")
    everybody = [*HELD_OUT, "sampler={name='full'}"]
    found = cost(privately(plan, everybody))
    accountant = rdp.RdpAccountant(list(range(2, 65)))
    rounds = event.SelfComposedDpEvent(event.GaussianDpEvent(1.0), 2)
    accountant.compose(event.RepeatAndSelectDpEvent(rounds, 3, 1.0))
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    noisier = cost(privately(plan, everybody, vary=["privacy.noise-multiplier=[1.0, 3.0]"]))
    assert noisier.epsilon == found.epsilon  # the costliest setting counts
    assert "no epsilon covers them" in " ".join(found.lines())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reproducible", "secure"])
def test_the_best_of_all_trials_is_published_without_its_number(plan, fedrec, tmp_path, mode):
    """All trials have one split, and seeds that do not follow from their numbers."""
    asked = privately(plan, [*HELD_OUT, f"privacy.mode={mode}"])
    found = sweep(asked, tmp_path / "private")
    assert len(found.runs) == asked.trials
    (chosen,) = found.chosen
    assert found.settings.loc[chosen, "hits@5"] == found.settings["hits@5"].max()
    runs = [RunFolder(found.folder / folder) for folder in found.runs["folder"]]
    parts = [Population.of(run.experiment).partition for run in runs]
    for part in parts:
        np.testing.assert_array_equal(part.training_clients, parts[0].training_clients)
        np.testing.assert_array_equal(part.validation_rows, parts[0].validation_rows)
    seeds = list(found.runs["seed"])
    assert len(set(seeds)) == len(seeds) and min(seeds) > 2**20
    repeated = privately(plan, [*HELD_OUT, f"privacy.mode={mode}"]).seeds
    assert (repeated == asked.seeds) == (mode == "reproducible")

    published = Result.load(found.folder / "chosen")
    best = Result.load(runs[chosen - 1].path)
    for name, value in best.parameters.items():
        np.testing.assert_array_equal(published.parameters[name], value)
    assert published.experiment == best.experiment and published.metrics.keys() == {"hits@5"}
    files = {str(file.relative_to(published.folder)) for file in published.folder.rglob("*")}
    assert files == PUBLISHED
    about = json.loads((published.folder / "run.json").read_text())
    assert about.keys() == {"format", "fedrec", "experiment-sha256"}
    for file in published.folder.rglob("*.*"):
        assert best.folder.name.encode() not in file.read_bytes()
    assert found.folder.stat().st_mode & 0o777 == 0o700
    assert with_sweeps([found.folder]) == [found.folder / "chosen"]

    before = (published.folder / "run.json").read_bytes()
    again = privately(plan, [*HELD_OUT, f"privacy.mode={mode}"])
    assert sweep(again, found.folder).plan == asked  # the number of trials is drawn once
    assert (published.folder / "run.json").read_bytes() == before
    shutil.rmtree(runs[0].path)
    assert sweep(again, found.folder).runs["state"][0] == "waiting"  # one choice is made
    assert (published.folder / "run.json").read_bytes() == before


PUBLISHED = {
    *("experiment.toml", "run.json", "environment.json", "status.json", "result.json"),
    *("rounds.csv", "users.csv", "groups.csv"),
    *("checkpoints", "checkpoints/round-000002.npz"),
}


@pytest.mark.slow
def test_the_cost_of_the_choice_stands_wherever_the_chosen_run_is_shown(plan, fedrec, tmp_path):
    asked = privately(plan)
    costs = cost(asked)
    once = SweepFolder(sweep(asked, tmp_path / "private").folder)
    alone = [run for job in once.jobs() if (run := job.run()) is not None]
    spent = f"{alone[0].summary()['privacy']['epsilon']:.4g}"
    kept = RunFolder(tmp_path / "private" / "chosen")
    assert kept.summary()["privacy"]["epsilon"] == costs.epsilon > 1.2 * float(spent)
    page = report([kept.read_result()])
    code, printed, _ = fedrec("resume", tmp_path / "private")
    assert not code and str(kept.path) in printed and "-seed" not in printed
    for text in (page, printed):
        assert f"{costs.epsilon:.4g}" in text and spent not in text.replace(f"{costs.once:.4g}", "")
        assert not re.search(r"000\d-seed|setting \d", text)
    file = tmp_path / "page.html"
    assert not fedrec("report", tmp_path / "private", "--output", file)[0]
    assert f"{costs.epsilon:.4g} at delta" in file.read_text()
    assert f"{kept.summary()['metrics']['hits@5']:.4f}" in page
    together = total_of([kept, alone[0]], chosen=False)
    assert together.epsilon is None and "private choice" in together.why_none


def test_equally_good_trials_publish_one_model(plan, tmp_path):
    """All items are within the list, so that all scores are 1."""
    asked = privately(plan, [*HELD_OUT, "rounds=1", "evaluation.ks=[5, 30]"], aim="hits@30")
    found = sweep(asked, tmp_path / "private")
    assert asked.trials > 1 and set(found.settings["hits@30"]) == {1.0}
    assert len(found.chosen) == 1


@pytest.mark.parametrize(
    "varied",
    [
        "split.validation-users=[0.25, 0.5]",
        "positive-above=[2.0, 3.0]",
        "dataset.users=[24, 25]",
        "evaluation.final-users=[2, 3]",
        "split-seed=[0, 1]",
    ],
)
def test_settings_with_other_data_are_refused(plan, varied):
    with pytest.raises(ExperimentError, match="have different data") as refused:
        privately(plan, vary=[varied])
    assert varied.partition("=")[0].partition(".")[0] in str(refused.value)


def test_several_seeds_and_scores_of_training_users_are_refused(plan):
    with pytest.raises(ExperimentError, match="one run per trial"):
        privately(plan, seeds=2)
    with pytest.raises(ExperimentError, match="not of training users"):
        cost(privately(plan, aim="popularity@5"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("privacy={clip-norm=1.0, noise-multiplier=0.0, delta=1e-5}", "with noise in all phases"),
        ("privacy.placement=local", "'central' or 'distributed'"),
        ("split={name='leave-one-out', validation=true}", "validation users who do not train"),
    ],
)
def test_settings_without_a_bound_are_not_chosen_privately(plan, change, expected):
    with pytest.raises(ExperimentError, match="made private") as refused:
        cost(privately(plan, [*HELD_OUT, change]))
    assert expected in str(refused.value)


def test_a_range_has_no_largest_cost(plan):
    with pytest.raises(ExperimentError, match="range"):
        privately(plan, vary=["strategy.server-lr={low=0.1, high=1.0}"])
