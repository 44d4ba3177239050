# SPDX-License-Identifier: Apache-2.0
"""DP-VAE, and its noise on another model, as whole runs: three engines, an interrupted run,
reports, cohorts."""

import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedrec.errors import ExperimentError
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.cli import app
from tests.runs import parameters_in

COMMON = (
    "model={name='vae', hidden=6, latent=3}",
    "split={name='ratio'}",
    "evaluation.fine-tune={epochs=0}",
    "sampler.cohort=12",
)
MODES = {
    "sound": "step={name='dpvae', participations=2, clip='user', quantile={}, priors={}}",
    "paper": "step={name='dpvae', mode='paper', examples=3, learning-rate=1e-4}",
}


def test_the_papers_mode_reports_no_guarantee_before_and_after(run_tiny, caplog):
    result = run_tiny(*COMMON, MODES["paper"])
    promise = "no finite guarantee: the clip norm comes from private data"
    assert any(
        promise in record.message for record in caplog.records if record.levelname == "WARNING"
    )
    assert sum(promise in line for line in result.privacy) == 1
    assert promise in (result.folder / "log.txt").read_text()
    assert runner.resume(result.folder).privacy == result.privacy
    table = pd.read_csv(result.folder / "epsilons.csv", index_col="client")
    assert np.isinf(table.loc[table["uploads"] > 0, "replace-one"]).all() and len(table) == 24


def test_a_sound_run_writes_what_each_user_spent(run_tiny):
    limited = ("sampler={name='limited', cohort=12, participations=2}", "rounds=9")
    result = run_tiny(*COMMON, "step={name='dpvae', participations=2}", *limited)
    table = pd.read_csv(result.folder / "epsilons.csv", index_col="client")
    assert (table["uploads"] == 2).all() and table["nominal"].nunique() == 24
    np.testing.assert_allclose(table["replace-one"], table["nominal"], rtol=1e-6)
    assert any(line.startswith("0 of 24 users spent more") for line in result.privacy)


def test_a_run_ends_when_every_budget_is_spent(run_tiny):
    limited = ("sampler={name='limited', cohort=12, participations=2}", "rounds=9")
    result = run_tiny(*COMMON, "step={name='dpvae', participations=2}", *limited)
    assert result.rounds["num-clients"].sum() == 2 * 24 and result.rounds["num-clients"].min() > 0
    assert RunFolder(result.folder).status() == {"state": "finished", "round": len(result.rounds)}
    assert len(result.rounds) < 9


def test_secure_noise_never_repeats_and_a_repeated_round_counts_again(run_tiny):
    settings = (
        *COMMON,
        "step={name='dpvae', noise='secure', participations=3}",
        "rounds=1",
        "evaluation.every=0",
    )
    one, two = (parameters_in(run_tiny(*settings, output=name).folder) for name in ("one", "two"))
    assert all((one[name] != two[name]).all() for name in one)


def test_a_sampler_that_draws_too_often_gives_a_warning(run_tiny, caplog):
    limited = "sampler={name='limited', cohort=12, participations=2}"
    run_tiny(*COMMON, "step={name='dpvae', participations=2}", limited, output="right")
    assert "devices will refuse" not in caplog.text
    run_tiny(*COMMON, "step={name='dpvae', participations=1}", limited, output="wrong")
    assert "devices will refuse" in caplog.text


def test_secret_cohorts_are_refused(run_tiny):
    with pytest.raises(ExperimentError, match="cannot be counted"):
        run_tiny(
            *COMMON, MODES["sound"], "privacy={clip-norm=1.0, noise-multiplier=1.0, mode='secure'}"
        )


def test_the_command_line_knows_before_anything_runs(tmp_path, tiny_experiment):
    import tomli_w

    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(tiny_experiment()))
    sets = [word for text in (*COMMON, MODES["sound"], "rounds=40") for word in ("--set", text)]
    found = CliRunner().invoke(
        app, ["privacy", "users", str(file), *sets, "--output", str(tmp_path / "users.csv")]
    )
    assert found.exit_code == 0, found.output
    table = pd.read_csv(tmp_path / "users.csv")
    assert "0 of 24 users spent more" in found.output and (table["uploads"] == 2).all()
    assert f"{table['nominal'].max():.4g}" in found.output
    assert math.isfinite(table["replace-one"].max())
