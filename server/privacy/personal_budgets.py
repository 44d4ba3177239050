# SPDX-License-Identifier: Apache-2.0
"""Privacy budgets of users who add their own noise: guarantees, exhausted budgets, and the epsilon
of each user.

The cohorts are known from the sampler; a sampled user is charged whether or not its upload arrived.
With noise from the operating system a repeated round is another release and is charged again;
`uploads.txt` in the run folder has a line for each round in which clients were asked.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.serverapp.strategy import Strategy

from fedrec.components import registry
from fedrec.errors import ExperimentError, RunError
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.privacy.personal.report import epsilon_table, promises, summary, words
from fedrec.runs.folder import RunFolder
from fedrec.runtime.atomic_files import write_atomically
from server.extension import RunExtension
from strategies.base import Cohorts, CohortStrategy

log = logging.getLogger("fedrec")


def accounts_of(run: RunFolder, strategy: Strategy, cohorts: Cohorts) -> PersonalAccounts | None:
    """The accounts of a run; None where users have no noise of their own.

    Raises:
        ExperimentError: cohorts are drawn from the operating system, so that nobody could count who
            was in them.
    """
    settings = run.experiment.settings(registry.STEP)
    if not isinstance(settings, PersonalNoise):
        return None
    privacy = run.experiment.privacy
    if privacy is not None and privacy.mode == "secure":
        raise ExperimentError(
            "uploads of single users cannot be counted where cohorts are secret",
            expected="no [privacy] table with mode = 'secure' beside users' own noise",
            got="privacy.mode = 'secure'",
            fix="leave out [privacy] and set step.noise = 'secure'",
        )
    return PersonalAccounts(
        run, settings, cohorts if isinstance(strategy, CohortStrategy) else None, cohorts.clients
    )


class PersonalAccounts(RunExtension):
    """What each user of a run has spent.

    Args:
        run: the run folder; gets `epsilons.csv`.
        settings: the users' noise.
        cohorts: who is drawn; None: everybody in every round.
        clients: `int64 [clients]`, ascending: all who may be drawn.
    """

    name = "personal"
    costly = True

    def __init__(
        self, run: RunFolder, settings: PersonalNoise, cohorts: Cohorts | None, clients: np.ndarray
    ) -> None:
        self.run, self.settings, self.cohorts, self.clients = run, settings, cohorts, clients
        self._file = run.path / "uploads.txt"
        for line in promises(settings):
            log.warning(line) if settings.mode == "paper" else log.info(line)
        planned, drawn = (
            settings.participations,
            run.experiment.sampler.options.get("participations"),
        )
        if planned is not None and (drawn is None or drawn > planned):
            log.warning(
                "the sampler may draw a user more often than its budget covers (%d): devices will"
                " refuse; set sampler.name = 'limited' and sampler.participations = %d",
                planned,
                planned,
            )

    def before_upload(self, round_number: int) -> None:
        """Record that the clients of a round are asked, before they are; synced to disk on return.

        Raises:
            RunError: it could not be written.
        """
        if self.settings.noise == "reproducible":
            return  # the same bits again are not a new release
        try:
            with self._file.open("ab") as file:
                file.write(f"{round_number}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write {self._file}",
                expected="a line on the disk before clients are asked",
                got=error.strerror or str(error),
                fix="free some space and resume the run",
            ) from error

    @property
    def hides_updates(self) -> bool:
        """True: the uploads of the time estimate would be releases, too."""
        return True

    def why_stop(self, round_number: int) -> str:
        """The reason to stop if no user's budget covers another round; else empty."""
        if self.settings.participations is None or self.cohorts is None:
            return ""
        anybody = len(self.cohorts.sample(round_number))
        return "" if anybody else "every user's budget is spent"

    def table(self, rounds: int) -> pd.DataFrame:
        """One row per user after so many rounds, see `epsilon_table`."""
        asked, times = np.zeros(len(self.clients), dtype=np.int64), self._times()
        for number in range(1, rounds + 1):
            drawn = self.clients if self.cohorts is None else self.cohorts.sample(number)
            asked[np.searchsorted(self.clients, drawn)] += max(1, times[number])
        return epsilon_table(self.settings, self.clients.tolist(), asked.tolist())

    def _times(self) -> Counter[int]:
        """How often the clients of each round were asked, if it is recorded."""
        return uploads_in(self._file) if self._file.exists() else Counter()

    def close(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """Write `epsilons.csv`; gives the report in words and as JSON values."""
        table = self.table(rounds)
        write_atomically(self.run.path / "epsilons.csv", table.to_csv())
        said = words(self.settings, table)
        return said, {"mode": self.settings.mode, "users": summary(table), "in words": said}


def uploads_in(file: Path) -> Counter[int]:
    """How often the clients of each round were asked, from the file that records it.

    Raises:
        RunError: it is damaged; the users' spent budgets would be underestimated.
    """
    try:
        lines = file.read_bytes().decode("ascii").splitlines()
        rounds = Counter(int(line) for line in lines)
        if any(number < 1 for number in rounds):
            raise ValueError("rounds begin with 1")
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} is damaged",
            expected="the number of a round in each line",
            got=str(error),
            fix="restore it from a backup; without it what users have spent is unknown",
        ) from None
    return rounds
