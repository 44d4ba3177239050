# SPDX-License-Identifier: Apache-2.0
"""Privacy budgets of users who add their own noise: guarantees, exhausted budgets, and the epsilon
of each user.

The cohorts are known from the sampler; a sampled user is charged when it is asked, whether or not
its upload arrives: clients that join later change the cohorts that the sampler would draw. With
noise from the operating system a repeated round is another release and is charged again;
`uploads.txt` in the run folder has a line for each round in which clients were asked; a run with
missing lines is not resumed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.serverapp.strategy import Strategy

from fedrec.components import registry
from fedrec.data.population import check_declared_categories, check_independent_clients
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import phases_of
from fedrec.privacy.personal import PersonalNoise, epsilon_table, promises, summary, words
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import append_durably, write_atomically
from server.checkpoint import RunExtension, reading
from strategies.base import Cohorts, CohortStrategy

log = logging.getLogger("fedrec")


def accounts_of(run: RunFolder, strategy: Strategy, cohorts: Cohorts) -> _PersonalAccounts | None:
    """Make the accounts of a run; None if users add no noise.

    Raises:
        ExperimentError: cohorts are drawn from the operating system and so cannot be counted, or
            the strategy has phases, whose uploads have another cost.
    """
    experiment = run.experiment
    settings = experiment.settings(registry.STEP)
    if not isinstance(settings, PersonalNoise):
        return None
    phases = phases_of(experiment)
    if len(phases) > 1:
        raise ExperimentError(
            "users' own budgets do not cover the uploads of other phases",
            got=f"{experiment.strategy.name!r} with {', '.join(phase.name for phase in phases)}",
            fix="set strategy.name = 'reptile', or choose a step without users' own noise",
        )
    if settings.mode == "sound":
        what = f"step {experiment.step.name}"
        check_independent_clients(experiment, "replace-one", what)
        check_declared_categories(experiment, what)
    if experiment.hides_cohorts:
        raise ExperimentError(
            "uploads of single users cannot be counted where cohorts are secret",
            fix="leave out [privacy] and set step.noise = 'secure'",
        )
    return _PersonalAccounts(
        run, settings, cohorts if isinstance(strategy, CohortStrategy) else None, cohorts.clients
    )


class _PersonalAccounts(RunExtension):
    """Privacy budget spent by each user of a run.

    Args:
        run: the run folder, for `epsilons.csv`.
        settings: the users' noise.
        cohorts: the drawn clients; None: all clients in every round.
        clients: `int64 [clients]`, ascending: all clients that may be drawn.
    """

    name = "personal"

    def __init__(
        self, run: RunFolder, settings: PersonalNoise, cohorts: Cohorts | None, clients: np.ndarray
    ) -> None:
        self.run = run
        self.settings = settings
        self.cohorts = cohorts
        self.clients = clients
        self._file = run.path / "uploads.txt"
        self._asked = pd.Series(0, index=clients)  # some clients may have joined since the start
        for line in promises(settings):
            log.warning(line) if settings.mode == "paper" else log.info(line)
        planned = settings.participations
        drawn = run.experiment.sampler.options.get("participations")
        if planned is not None and (drawn is None or drawn > planned):
            log.warning(
                "the sampler may draw a user more often than its budget covers (%d): devices will"
                " refuse; set sampler.name = 'limited' and sampler.participations = %d",
                planned,
                planned,
            )

    def begin(self, rounds: int) -> None:
        """Start at round 1, and charge earlier requests.

        Raises:
            RunError: rounds were run before, and no upload is recorded.
        """
        self._charge_since(0, least=min(rounds, 1))

    def memory(self) -> dict[str, np.ndarray]:
        """Return the number of requests to each client, `clients` and `asked`, both `int64
        [clients]`, and the number of lines in `uploads.txt`."""
        asked = self._asked.loc[self._asked > 0]
        return {
            "clients": asked.index.to_numpy(),
            "asked": asked.to_numpy(),
            "lines": np.asarray(len(_uploads_in(self._file))),
        }

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned, and charge the rounds recorded since then.

        Raises:
            RunError: `uploads.txt` has fewer lines than at that time.
        """
        self._add(pd.Series(memory["asked"], index=memory["clients"]))
        lines = int(memory["lines"])
        self._charge_since(lines, least=lines)

    def _charge_since(self, start: int, *, least: int) -> None:
        """Charge the recorded rounds from a line on; fewer lines than `least` raise an error."""
        rounds = _uploads_in(self._file)
        if self.settings.noise == "secure" and len(rounds) < least:
            raise RunError(
                f"{self._file} does not contain all rounds in which clients were asked",
                expected=f"at least {least} lines, as the newest checkpoint says",
                got=str(len(rounds)),
                fix="restore it from a backup; without it what users have spent is unknown",
            )
        for number in rounds[start:]:
            self._charge(number)

    def _charge(self, round_number: int) -> None:
        drawn = self.clients if self.cohorts is None else self.cohorts.sample(round_number)
        self._add(pd.Series(1, index=drawn))

    def _add(self, times: pd.Series) -> None:
        """Charge clients so many times."""
        self._asked = self._asked.add(times, fill_value=0).astype(np.int64)

    def before_upload(self, round_number: int) -> None:
        """Charge the clients of a round, and record the round, before they are asked; synced to
        disk on return.

        Raises:
            RunError: it could not be written.
        """
        if self.settings.noise == "secure":  # the same bits again are not a new release
            before = self._file.read_bytes() if self._file.exists() else b""
            whole = before[-1:] in (b"", b"\n")  # otherwise a crash cut off the last line
            line = (b"" if whole else b"\n") + f"{round_number}\n".encode()
            wanted = "a line on disk before clients are asked"
            append_durably(self._file, line, end=len(before), expected=wanted)
        self._charge(round_number)

    def why_stop(self, round_number: int) -> str:
        """Return the reason to stop if no user's budget covers another round; else empty."""
        if self.settings.participations is None or self.cohorts is None:
            return ""
        anybody = len(self.cohorts.sample(round_number))
        return "" if anybody else "every user's budget is spent"

    def table(self) -> pd.DataFrame:
        """Return one row per user, see `epsilon_table`."""
        if self.cohorts is not None:  # clients that joined and were not asked
            self._add(pd.Series(0, index=self.cohorts.clients))
        return epsilon_table(self.settings, self._asked.index.tolist(), self._asked.tolist())

    def report(self, rounds: int) -> dict[str, Any]:
        """Write `epsilons.csv`, and return the report."""
        table = self.table()
        write_atomically(self.run.path / "epsilons.csv", table.to_csv())
        lines = words(self.settings, table)
        return {"mode": self.settings.mode, "users": summary(table), "in words": lines}


def _uploads_in(file: Path) -> list[int]:
    """Read the rounds in which clients were asked, in order, from their file, if any.

    Raises:
        RunError: it is damaged; the users' spent budgets would be underestimated.
    """
    if not file.exists():
        return []
    fix = "restore it from a backup; without it what users have spent is unknown"
    with reading(file, "the number of a round in each line", fix):
        rounds = [int(line) for line in file.read_bytes().decode("ascii").splitlines()]
        if any(number < 1 for number in rounds):
            raise ValueError("round number below 1")
        return rounds
