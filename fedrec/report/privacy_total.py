# SPDX-License-Identifier: Apache-2.0
"""Total privacy cost of several runs. An observer of many private runs on the same data has seen
all of them: the charges in their ledgers are composed by the accountant to one total, whether a run
was finished or not (composition over all runs, independently of the selected one). The total also
covers the selection of a run, which then needs no additional noise. It holds for training users;
the lines also state whose rows were used to choose settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant, Charge, Ledger
from fedrec.privacy.accounting.events import DEFAULT_BACKEND
from fedrec.runs.folder import RunFolder

_DELTA = 1e-5  # unless a run states another
_DATA = ("dataset", "split", "seed", "split-seed", "positive-above", "perturb")


@dataclass(frozen=True)
class PrivacyTotal:
    """Total privacy cost of several runs.

    Attributes:
        runs: number of private runs, finished or not.
        epsilon: epsilon of all charges; infinite if a release had no noise; None if they cannot be
            composed.
        delta: delta of this epsilon.
        lines: explanation, one paragraph per line; empty without private runs.
        why_none: reason for a missing epsilon; else empty.
    """

    runs: int
    epsilon: float | None
    delta: float
    lines: tuple[str, ...]
    why_none: str = ""

    def sentence(self, start: str, rest: str) -> str:
        """Sentence on the total, with that start and rest, or on the reason for a missing or
        infinite one; empty if nothing was charged."""
        if self.epsilon is None:
            return f"{start} have no total epsilon: {self.why_none}."
        if math.isinf(self.epsilon):
            return f"{start} have an infinite total epsilon, because a release had no noise."
        if not self.epsilon:
            return ""
        return f"{start} cost epsilon {self.epsilon:.4g} at delta {self.delta:g} together{rest}"


def total_of(runs: Sequence[RunFolder], *, chosen: bool) -> PrivacyTotal:
    """Compute the total privacy cost of runs.

    Args:
        runs: the run folders.
        chosen: whether a setting was chosen by these runs.
    """
    charges = list(_charges(runs))
    private = [run for run in runs if _is_private(run)]
    delta = max((_delta(run) for run in private), default=_DELTA)
    backends = (run.experiment.privacy.backend for run in private if run.experiment.privacy)
    epsilon, why = _epsilon(charges, next(backends, DEFAULT_BACKEND), delta)
    if any("choice" in run.summary().get("privacy", {}) for run in private):
        epsilon = None
        why = "one is the result of a private choice, with a cost that is not a sum of charges"
    total = PrivacyTotal(len(private), epsilon, delta, (), why)
    return replace(total, lines=tuple(_lines(private, total, chosen=chosen))) if private else total


def shown_together(folders: Iterable[Path]) -> list[str]:
    """Describe the total cost of private runs, one line per dataset with several.

    Args:
        folders: run folders.
    """
    by_data: dict[str, list[RunFolder]] = {}
    for run in map(RunFolder, dict.fromkeys(folders)):
        if _is_private(run):
            data = json.dumps(run.experiment.table()["dataset"], sort_keys=True, default=str)
            by_data.setdefault(data, []).append(run)
    return [_shown(runs) for runs in by_data.values() if len(runs) > 1]


def systems_together(run: RunFolder) -> list[str]:
    """Describe the total cost of the private systems of one run, which share users. Empty if at
    most one was charged, unless users also add local noise."""
    ledgers = (run.path / "privacy.jsonl", *sorted(run.path.glob("baselines/*/privacy.jsonl")))
    systems = sum(bool(Ledger(ledger).charges) for ledger in ledgers)
    if systems and (run.path / "epsilons.csv").exists():
        return [
            "Users add local noise in this run: to each user's epsilon add those of the"
            " private baselines, which learn from the same users."
        ]
    if systems < 2:
        return []
    return [
        total_of([run], chosen=False).sentence(
            f"The {systems} private systems of this run",
            ": they learn from the same users, and this holds where all of them, or their results,"
            " are published.",
        )
    ]


def _shown(runs: Sequence[RunFolder]) -> str:
    total = total_of(runs, chosen=False)
    data = runs[0].experiment.dataset.name
    start = f"The {total.runs} private runs on {data} that are shown"
    rest = (
        " (their ledgers added up by the accountant): if you publish all of these runs, report this"
        " total instead of the epsilon of a single run."
    )
    return total.sentence(start, rest) or (
        f"{start} have no server releases to add up: the private steps are done on the devices, and"
        " each user's epsilons add up over the runs."
    )


def _lines(private: Sequence[RunFolder], total: PrivacyTotal, *, chosen: bool) -> Iterable[str]:
    rest = (
        ", not only the epsilon of the selected run. A simulation on public data may report the"
        " latter; a release may not."
    )
    if sentence := total.sentence(f"The {total.runs} private runs of this sweep", rest):
        yield sentence
    local = [run for run in private if (run.path / "epsilons.csv").exists()]
    if local:
        yield (
            f"In {len(local)} of these runs users add local noise: every user's epsilons add up"
            " over the runs in which the user took part."
        )
    if chosen:
        yield (
            "The choice used the rows of validation users without noise: no epsilon here"
            " covers these users, unless they are also training users."
        )


def _is_private(run: RunFolder) -> bool:
    experiment = run.experiment
    ledgers = (run.path / "baselines").glob("*/privacy.jsonl")
    local = (run.path / "epsilons.csv").exists()
    return experiment.privacy is not None or local or experiment.perturb is not None or any(ledgers)


def _charges(runs: Iterable[RunFolder]) -> Iterable[Charge]:
    """Yield all charges of runs.

    A private baseline in mode `reproducible` draws equal noise for equal data, settings and seed:
    runs that differ in the federated system alone make the same release, which counts once.
    """
    made: set[str] = set()
    for run in runs:
        yield from Ledger(run.path / "privacy.jsonl").charges
        table = run.experiment.table()
        parts = [table.get(key) for key in _DATA]
        for label, options in run.experiment.evaluation.baseline_settings().items():
            release = json.dumps([label, options, parts], sort_keys=True, default=str)
            if options.get("mode", "reproducible") == "reproducible" and release in made:
                continue
            made.add(release)
            yield from Ledger(run.baseline_folder(label) / "privacy.jsonl").charges


def _epsilon(charges: Sequence[Charge], backend: str, delta: float) -> tuple[float | None, str]:
    """Epsilon of all charges; or None and the reason, such as different adjacencies."""
    accountant = Accountant(backend)
    try:
        for charge in charges:
            accountant.step(charge.event)
        return (accountant.epsilon(delta).epsilon if charges else 0.0), ""
    except ExperimentError as error:
        return None, f"{error.problem} ({error.got})"


def _delta(run: RunFolder) -> float:
    """Largest delta of a run; from its settings if it is unfinished."""
    settings = run.experiment.privacy
    deltas = [] if settings is None or settings.delta is None else [settings.delta]
    labels = run.experiment.evaluation.baseline_settings()
    for stated in (run.summary(), *(run.read_baseline(label) or {} for label in labels)):
        with suppress(ValueError, KeyError, TypeError):
            deltas.append(float(stated["privacy"]["delta"]))
    return max(deltas, default=_DELTA)
