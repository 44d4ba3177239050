# SPDX-License-Identifier: Apache-2.0
"""Runs that are extended, changed or overwritten, and failed starts that leave nothing behind."""

import pytest

from fedrec.errors import ExperimentError, FedrecError, RunError
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.amend import discard, write_amended
from tests.runs import assert_same_run

NOISE = "privacy={clip-norm=1.0, noise-multiplier=1.0, backend='pld'}"


@pytest.mark.parametrize("privacy", [(), (NOISE,)], ids=["plain", "private"])
def test_an_extended_run_is_one_that_had_more_rounds_from_the_start(run_tiny, privacy):
    whole = run_tiny("rounds=4", *privacy, output="whole")
    short = run_tiny("rounds=2", *privacy, output="short")
    longer = runner.resume(short.folder, ["rounds=4"])
    assert longer.metrics == whole.metrics
    assert_same_run(longer, whole)
    run = RunFolder(short.folder)
    assert run.experiment.rounds == 4 and len(run.digests) == 2
    assert runner.resume(short.folder).metrics == whole.metrics


def test_a_crash_while_a_run_is_amended_leaves_it_unchanged(run_tiny):
    result = run_tiny()
    text = (result.folder / "experiment.toml").read_text()
    write_amended(RunFolder(result.folder), result.experiment.model_copy(update={"rounds": 3}))
    (result.folder / "experiment.toml").write_text(text)  # the second file was not written
    assert runner.resume(result.folder).metrics == result.metrics


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy.server-lr=0.3", "cannot be changed after the first round"),
        ("evaluation.fine-tune={epochs=5}", "cannot be changed after the first round"),
        ("rounds=1", "cannot be removed"),
        ("rounds=many", "valid integer"),
    ],
)
def test_what_was_learned_with_cannot_change(run_tiny, override, words):
    result = run_tiny()
    with pytest.raises(ExperimentError, match=words):
        runner.resume(result.folder, [override])
    assert runner.resume(result.folder).metrics == result.metrics


def test_noise_that_was_calibrated_to_all_rounds_is_not_stretched(run_tiny):
    result = run_tiny("privacy={clip-norm=1.0, epsilon=5.0, backend='pld'}")
    with pytest.raises(ExperimentError, match="more noise"):
        runner.resume(result.folder, ["rounds=4"])


def test_a_run_whose_settings_do_not_fit_leaves_no_folder(run_tiny, tmp_path):
    """Refused after the folder was created: eighteen clients train, and no baseline was fitted
    before."""
    with pytest.raises(ExperimentError, match=r"sampler\.cohort"):
        run_tiny("sampler.cohort=100", "evaluation.baselines=['popularity']")
    assert not (tmp_path / "run").exists()
    assert run_tiny().metrics


def test_a_run_without_a_round_may_change_in_everything(tiny_experiment, load_tiny, tmp_path):
    stale = RunFolder.create(runner.settle(load_tiny("sampler.cohort=100")), tmp_path / "run")
    result = runner.resume(stale.path, ["sampler.cohort=6"])
    assert result.metrics == runner.run(tiny_experiment(), output=tmp_path / "other").metrics


def test_a_run_that_failed_in_its_first_round_may_change_in_everything(run_tiny, tmp_path):
    popular = "evaluation.baselines=['popularity']"
    with pytest.raises(FedrecError, match="diverged in round 1"):
        run_tiny("step.learning-rate=1e30", popular, output="run")
    changed = "step.learning-rate=0.05"
    result = runner.resume(tmp_path / "run", [changed])
    whole = run_tiny(changed, popular, output="whole")
    assert (result.metrics, result.baselines) == (whole.metrics, whole.baselines)


def test_baselines_that_were_evaluated_alone_are_not_begun_anew(tiny_experiment, tmp_path):
    table = {key: tiny_experiment()[key] for key in ("name", "dataset", "split")}
    table["evaluation"] = {"baselines": ["popularity"]}
    result = runner.run(table, output=tmp_path / "run")
    with pytest.raises(ExperimentError, match="cannot be changed"):
        runner.resume(result.folder, ["evaluation.baselines=['ease']"])
    assert runner.resume(result.folder).baselines == result.baselines


def test_only_run_folders_without_a_release_are_discarded(run_tiny, tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(RunError, match="is not a run folder"):
        discard(tmp_path / "photos")
    released = run_tiny(NOISE, "privacy.mode='secure'", output="released")
    with pytest.raises(RunError, match="ledger of a release"):
        discard(released.folder)
    simulated = run_tiny(NOISE, output="simulated")
    discard(simulated.folder)
    assert released.folder.exists() and not simulated.folder.exists()
