# SPDX-License-Identifier: Apache-2.0
"""What a private choice publishes: the folder `chosen/` of a sweep, a run folder with the chosen
setting, its parameters, its score and the cost of the choice.

It is made of these alone. Files of the chosen run that tell more stay private: metrics of rounds
and users, which have no noise, its ledger, which states the cost of one trial, the times, and the
name, which has the number of the trial.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.atomic_files import write_atomically
from server.checkpoint import Checkpoints, State
from server.early_stopping import ending
from simulations.sweep.private import ChoiceCost

CHOSEN = "chosen"
_PRIVATE = ("created", "command")  # when the sweep ended, and where it is


def published(folder: Path) -> Path | None:
    """The published run of a sweep's folder; None before there is one."""
    return folder / CHOSEN if (folder / CHOSEN / "result.json").is_file() else None


def publish(run: RunFolder, score: float, cost: ChoiceCost, folder: Path) -> None:
    """Make the published run of a sweep's folder from the chosen run; one that is there remains.

    Args:
        run: the chosen run, finished.
        score: its score, with noise if there is any.
        cost: of the choice.
        folder: of the sweep.
    """
    state = Checkpoints.of(run).latest()
    if state is None or published(folder) is not None:
        return
    shutil.rmtree(folder / CHOSEN, ignore_errors=True)  # of an interrupted start
    target = RunFolder.create(run.experiment, folder / CHOSEN)
    about = {key: value for key, value in target.about.items() if key not in _PRIVATE}
    write_atomically(target.path / "run.json", json.dumps(about, indent=2) + "\n")
    last, parameters = ending(state)
    rounds = [{"round": number + 1, "epsilon": cost.epsilon} for number in range(last)]
    Checkpoints.of(target).save(State(last, parameters))
    target.write_rounds(rounds, [])
    target.set_status("finished", last)
    nobody = pd.DataFrame(index=pd.Index([], dtype="int64", name="client"))
    result = Result(
        experiment=run.experiment,
        folder=target.path,
        metrics={cost.aim: score},
        before_fine_tuning={},
        baselines={},
        rounds=pd.DataFrame(rounds),
        users=nobody,
        groups=pd.DataFrame(index=pd.Index([], name="group")),
    )
    target.write_result(result, {"privacy": cost.record()})
