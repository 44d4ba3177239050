# SPDX-License-Identifier: Apache-2.0
"""Total privacy cost of the private runs of a table: the sum of their ledgers, or the reason why
there is none."""

import json
import math

import pytest
from typer.testing import CliRunner

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import from_record
from fedrec.report.page.page import report
from fedrec.report.privacy_total import shown_together
from simulations.cli import app

BY_CLIENT = "split.stream=client"
NOISE = "privacy={clip-norm=1.0, noise-multiplier=2.0, delta=1e-5}"


@pytest.fixture
def two(run_tiny):
    """Two private runs with other seeds."""
    return [run_tiny(NOISE, f"seed={seed}", output=f"run{seed}") for seed in range(2)]


def added_up(runs, delta):
    """Epsilon of all lines of the ledgers, read by hand."""
    accountant = Accountant("pld")
    for run in runs:
        for line in (run.folder / "privacy.jsonl").read_text().splitlines():
            charge = json.loads(line)
            accountant.step(from_record(charge["event"]), charge["count"])
    return accountant.epsilon(delta).epsilon


def test_the_total_is_that_of_all_ledgers(two):
    (line,) = shown_together([run.folder for run in two])
    total = added_up(two, 1e-5)
    assert f"The 2 private runs on synthetic that are shown cost epsilon {total:.4g}" in line
    assert total > max(run.rounds["epsilon"].iloc[-1] for run in two)
    assert shown_together([two[0].folder] * 2) == []  # one run, named twice


@pytest.mark.slow
def test_a_run_and_its_private_baselines_have_a_joint_epsilon(run_tiny, tmp_path):
    """By all ledgers of the run, added up by hand; above either, below their sum."""
    systems = "evaluation.baselines=['popularity', {name='dp-popularity', epsilon=5.0}]"
    result = run_tiny("privacy={clip-norm=1.0, epsilon=5.0, delta=1e-5}", systems)
    accountant = Accountant("pld")
    for file in result.folder.rglob("privacy.jsonl"):
        for line in file.read_text().splitlines():
            accountant.step(from_record(json.loads(line)["event"]))
    joint = accountant.epsilon(1e-5).epsilon
    assert 5 < joint < 10
    assert f"Together they cost epsilon {joint:.4g} at delta 1e-05" in result.privacy[-1]
    assert "the 2 private systems of this run" in report([result])
    alone = run_tiny("privacy={clip-norm=1.0, epsilon=5.0}", output="alone")
    assert "private systems of this run" not in " ".join(alone.privacy)


def test_a_run_and_a_baseline_of_another_adjacency_have_no_joint_epsilon(run_tiny):
    systems = "evaluation.baselines=[{name='dp-popularity', adjacency='add-remove'}]"
    assert "no epsilon together" in run_tiny(NOISE, systems, BY_CLIENT).privacy[-1]


def test_users_own_noise_and_a_private_baseline_add_up(run_tiny):
    own = ("model={name='vae', hidden=6, latent=3}", "step.name=dpvae", "sampler.name=full")
    systems = "evaluation.baselines=['dp-popularity']"
    assert "to each user's epsilon add those" in run_tiny(*own, systems).privacy[-1]


def test_runs_without_privacy_and_single_ones_need_no_total(two, run_tiny):
    plain = run_tiny(output="plain")
    assert shown_together([plain.folder, two[0].folder]) == []
    assert shown_together([plain.folder, *(run.folder for run in two)]) == shown_together(
        [run.folder for run in two]
    )


def test_runs_on_other_data_are_not_added_up(two, run_tiny):
    other = run_tiny(NOISE, "dataset.items=31", output="other")
    assert shown_together([two[0].folder, other.folder]) == []


def test_other_adjacencies_have_no_total_and_the_reason_is_given(two, run_tiny):
    poisson = ("sampler={name='poisson', cohort=6}", "privacy.adjacency=add-remove", BY_CLIENT)
    other = run_tiny(NOISE, *poisson, output="other")
    (line,) = shown_together([two[0].folder, other.folder])
    assert "no epsilon together" in line
    assert "add-remove and replace-one" in line and "different adjacencies" in line


def test_a_run_that_clips_without_noise_makes_it_infinite(two, run_tiny):
    bare = run_tiny(NOISE, "privacy.noise-multiplier=0.0", output="bare")
    assert math.isinf(bare.rounds["epsilon"].iloc[-1])
    (line,) = shown_together([two[0].folder, bare.folder])
    assert "infinite epsilon together" in line


def test_comparisons_and_pages_show_it(two):
    (line,) = shown_together([run.folder for run in two])
    assert line.replace("'", "&#39;") in report(two)
    assert "private runs on" not in report(two[:1])


def test_the_command_prints_it_with_its_table(run_tiny):
    popular = "evaluation.baselines=['popularity']"
    runs = [run_tiny(NOISE, popular, f"seed={s}", output=f"run{s}") for s in range(2)]
    folders = [str(run.folder) for run in runs]
    shown = CliRunner().invoke(app, ["compare", *folders])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert shown_together([run.folder for run in runs])[0] in words
