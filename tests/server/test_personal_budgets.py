# SPDX-License-Identifier: Apache-2.0
"""Budgets of users who add their own noise: repeated rounds, lost records, and users that join."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from fedrec.errors import ExperimentError, RunError
from fedrec.protocol.messages import Presence
from fedrec.runs.folder import RunFolder
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.nodes import Roster
from server.privacy.personal_budgets import accounts_of
from server.run import _Loop
from simulations import runner
from tests.runs import Broken, crash_in_round

CHEAP = ("evaluation.fine-tune.epochs=0", "evaluation.every=0")
VAE = "model={name='vae', hidden=6, latent=3}"
SECURE = "step={name='dpvae', noise='secure'}"


@pytest.mark.parametrize(("noise", "uploads"), [("secure", [2, 3]), ("reproducible", [2, 2])])
def test_a_repeated_round_of_users_own_noise_is_another_release(
    run_tiny, tmp_path, monkeypatch, noise, uploads
):
    own = (VAE, f"step={{name='dpvae', noise='{noise}'}}", "sampler.name=full", *CHEAP)
    run_tiny(*own, output="whole")
    crash_in_round(monkeypatch, 2, (_Loop, "_evaluate_sample"))
    with pytest.raises(Broken):
        run_tiny(*own, output="broken")
    runner.resume(tmp_path / "broken")
    told = [pd.read_csv(tmp_path / name / "epsilons.csv") for name in ("whole", "broken")]
    assert [table["uploads"].unique().tolist() for table in told] == [[count] for count in uploads]
    more = told[1]["replace-one"] > told[0]["replace-one"]
    assert more.all() if noise == "secure" else not more.any()


@pytest.mark.parametrize("lost", ["gone", "emptied", "cut"])
def test_uploads_of_users_own_noise_that_were_lost_are_missed(
    run_tiny, tmp_path, monkeypatch, lost
):
    """Resumed without them, `epsilons.csv` would say less than what users have spent."""
    crash_in_round(monkeypatch, 2, (_Loop, "_evaluate_sample"))
    with pytest.raises(Broken):
        run_tiny(VAE, SECURE, "sampler.name=full", *CHEAP, output="broken")
    file = tmp_path / "broken" / "uploads.txt"
    before = file.read_text()
    assert before == "1\n2\n"
    file.unlink() if lost == "gone" else file.write_text("" if lost == "emptied" else "1")
    if lost != "cut":
        with pytest.raises(RunError, match=r"all rounds in which clients were asked"):
            runner.resume(tmp_path / "broken")
        file.write_text(before)
    runner.resume(tmp_path / "broken")
    uploads = pd.read_csv(tmp_path / "broken" / "epsilons.csv")["uploads"]
    # a line that was cut off after the checkpoint of round 1 was not on the disk: nobody was asked
    assert uploads.unique().tolist() == [2 if lost == "cut" else 3]
    assert file.read_text() == ("1\n2\n" if lost == "cut" else "1\n2\n2\n")


def test_users_that_join_later_are_charged_when_they_are_asked(load_tiny, tmp_path):
    """Their coming changes the cohorts that the sampler would draw for the rounds before."""
    run = RunFolder.create(load_tiny(VAE, SECURE, "sampler.cohort=5"), tmp_path / "run")

    def accounts(clients):
        cohorts = SampledCohorts(run.experiment, roster(clients))
        return cohorts, accounts_of(run, make_strategy(run.experiment, cohorts), cohorts)

    def roster(clients):
        return Roster((0,), (Presence(0, np.arange(clients), np.arange(0)),))

    cohorts, first = accounts(18)
    asked = Counter(cohorts.sample(1).tolist())
    first.before_upload(1)
    cohorts.joined(roster(1000))
    asked.update(cohorts.sample(2).tolist())
    first.before_upload(2)
    memory = first.memory()
    assert max(asked) > 18
    asked.update(cohorts.sample(3).tolist())
    first.before_upload(3)  # is after the checkpoint, and repeated by the resumed run
    asked.update(cohorts.sample(3).tolist())
    _, resumed = accounts(1000)
    resumed.restore(memory)
    resumed.before_upload(3)
    table = resumed.table()
    assert len(table) == 1000 and table["uploads"][table["uploads"] > 0].to_dict() == dict(asked)


@pytest.mark.parametrize(
    "strategy", ["popularity-start", "{name='two-stage', stage-one={rounds=1, step={name='sgd'}}}"]
)
def test_phases_that_users_own_budgets_do_not_cover_are_refused(run_tiny, strategy):
    """What is uploaded without noise in one of them would be in no account."""
    strategy = strategy if "{" in strategy else f"{{name='{strategy}'}}"
    own = ("model.item-bias=true", "step={name='dpsgd'}", f"strategy={strategy}")
    with pytest.raises(ExperimentError, match="other phases"):
        run_tiny(*own)
