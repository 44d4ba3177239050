# SPDX-License-Identifier: Apache-2.0
"""Changes to a started run: more rounds, and settings that do not affect training. A run folder
documents its run, so settings that affect completed rounds are fixed; before the first round is
complete, all settings may change, and the run restarts. The digests of earlier versions stay in
run.json, because checkpoints contain them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import read_json, write_atomically

CHANGEABLE = (
    "rounds",
    "callbacks",
    "checkpoint",
    "evaluation.every",
    "evaluation.users",
    "engine.timeout",
    "engine.max-failures",
    "engine.memory-gib",
    "engine.threads",
    "engine.device",
)
"""Keys that may change after the first round."""


def amend(run: RunFolder, overrides: Iterable[str]) -> RunFolder:
    """Change settings of a run, which is then resumed; a finished run continues with added rounds.

    Args:
        run: the run folder.
        overrides: texts such as `"rounds=200"`.

    Raises:
        ExperimentError: a setting is invalid, or may no longer change.
        RunError: no round is complete, but the ledger has charges of a release.
    """
    texts = list(overrides)
    before = run.experiment
    after = load(run.experiment.table(), texts)
    if before.digest() == after.digest():
        return run
    if not (run.has_rounds if before.rounds else run.has_progress):
        discard(run.path)
        return RunFolder.create(after, run.path)
    for text in texts:
        _check_changeable(text)
    _check_rounds(run, before, after)
    write_amended(run, after)
    return RunFolder(run.path)


def write_amended(run: RunFolder, experiment: Experiment) -> None:
    """Change the experiment of a started run, and remove its result."""
    about = read_json(run.path / "run.json")
    earlier = [digest for digest in run.digests if digest != experiment.digest()]
    about |= {"experiment-sha256": experiment.digest(), "earlier-sha256": earlier}
    (run.path / "result.json").unlink(missing_ok=True)
    # Write the file that accepts both versions first, so that after a crash the earlier one is
    # valid.
    write_atomically(run.path / "run.json", json.dumps(about, indent=2) + "\n")
    write_atomically(run.path / "experiment.toml", experiment.toml())
    run.set_status("interrupted", run.status()["round"])


def discard(path: Path) -> None:
    """Remove a run folder, and no other folder, to replace it by another run.

    Raises:
        RunError: the folder is in use, or holds the ledger of a real release.
    """
    run = RunFolder(path)
    with run.lock():
        _check_discardable(run)
        shutil.rmtree(run.path)


def _check_changeable(text: str) -> None:
    key = text.partition("=")[0].strip()
    if not any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE):
        raise ExperimentError(
            f"{key!r} cannot be changed after the first round of a run",
            expected="one of " + ", ".join(CHANGEABLE),
            fix="start another run with `fedrec run`",
        )


def _check_rounds(run: RunFolder, before: Experiment, after: Experiment) -> None:
    done = run.status()["round"]
    if after.rounds < done:
        raise ExperimentError(
            "completed rounds cannot be removed",
            expected=f"rounds = {done} or more",
            fix="start another run with `fedrec run`",
        )
    privacy = before.privacy
    if privacy is not None and privacy.epsilon is not None and after.rounds != before.rounds:
        raise ExperimentError(
            "more rounds would have required more noise in the completed rounds, which was"
            f" calibrated to privacy.epsilon = {privacy.epsilon:g}",
            expected="privacy.noise-multiplier in a run that is extended",
            fix="start another run with `fedrec run`",
        )


def _check_discardable(run: RunFolder) -> None:
    ledgers = any(run.path.rglob("privacy.jsonl"))
    secure = run.experiment.hides_cohorts
    settings = run.experiment.evaluation.baseline_settings().values()
    if ledgers and (secure or any(baseline.get("mode") == "secure" for baseline in settings)):
        raise RunError(
            f"{run.path} holds the ledger of a release",
            got="mode = 'secure', whose ledger records a real release",
            fix="choose another --output, and keep this folder",
        )
