# SPDX-License-Identifier: Apache-2.0
"""Total privacy cost of several runs. An observer of many private runs on the same data has seen
all of them: the charges in their ledgers are composed by the accountant to one total, whether a run
was finished or not (composition over all runs, independently of the selected one). The total also
covers the selection of a run, which then needs no additional noise. It holds for training users;
the lines also state whose rows were used to choose settings.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant, Charge, Ledger
from fedrec.privacy.accounting.events import DEFAULT_BACKEND
from fedrec.runs.folder import RunFolder

_DELTA = 1e-5  # unless a run states another
_DATA = ("dataset", "split", "seed", "split-seed", "positive-above", "perturb")


def sweep_total(runs: Sequence[RunFolder], *, chosen: bool) -> list[str]:
    """Describe the total cost of the private runs of a sweep, finished or not, one paragraph per
    line; empty without any.

    Args:
        runs: the run folders.
        chosen: whether a setting was chosen by these runs.
    """
    private = [run for run in runs if _is_private(run)]
    if not private:
        return []
    rest = (
        ", not only the epsilon of the selected run. A simulation on public data may report the"
        " latter; a release may not."
    )
    lines = [_sentence(private, f"The {len(private)} private runs of this sweep", rest)]
    local = sum(_is_local(run) for run in private)
    if local:
        lines.append(
            f"In {local} of these runs users add local noise: every user's epsilons add up over the"
            " runs in which the user took part."
        )
    if chosen:
        lines.append(
            "The choice used the rows of validation users without noise: no epsilon here covers"
            " these users, unless they are also training users."
        )
    return list(filter(None, lines))


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
    if systems and _is_local(run):
        return [
            "Users add local noise in this run: to each user's epsilon add those of the"
            " private baselines, which learn from the same users."
        ]
    rest = (
        ": they learn from the same users, and this holds where all of them, or their results, are"
        " published."
    )
    start = f"The {systems} private systems of this run"
    return [_sentence([run], start, rest)] if systems > 1 else []


def _shown(runs: Sequence[RunFolder]) -> str:
    start = f"The {len(runs)} private runs on {runs[0].experiment.dataset.name} that are shown"
    rest = (
        " (their ledgers added up by the accountant): if you publish all of these runs, report this"
        " total instead of the epsilon of a single run."
    )
    return _sentence(runs, start, rest) or (
        f"{start} have no server releases to add up: the private steps are done on the devices, and"
        " each user's epsilons add up over the runs."
    )


def _sentence(private: Sequence[RunFolder], start: str, rest: str) -> str:
    """Sentence on the total epsilon of private runs, with that start and rest, or on the reason for
    a missing or infinite one; empty if nothing was charged."""
    if any("choice" in run.summary().get("privacy", {}) for run in private):
        return (
            f"{start} have no total epsilon: one is the result of a private choice, with a cost"
            " that is not a sum of charges."
        )
    charges = list(_charges(private))
    if not charges:
        return ""
    backends = (run.experiment.privacy.backend for run in private if run.experiment.privacy)
    accountant = Accountant(next(backends, DEFAULT_BACKEND))
    delta = max(map(_delta, private))
    try:
        for charge in charges:
            accountant.step(charge.event)
        epsilon = accountant.epsilon(delta).epsilon
    except ExperimentError as error:
        return f"{start} have no total epsilon: {error.problem} ({error.got})."
    if math.isinf(epsilon):
        return f"{start} have an infinite total epsilon, because a release had no noise."
    return f"{start} cost epsilon {epsilon:.4g} at delta {delta:g} together{rest}"


def _is_local(run: RunFolder) -> bool:
    """True if users of a run add noise of their own."""
    return (run.path / "epsilons.csv").exists()


def _is_private(run: RunFolder) -> bool:
    experiment = run.experiment
    ledgers = (run.path / "baselines").glob("*/privacy.jsonl")
    changed = experiment.privacy is not None or experiment.perturb is not None
    return changed or _is_local(run) or any(ledgers)


def _charges(runs: Iterable[RunFolder]) -> Iterator[Charge]:
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


def _delta(run: RunFolder) -> float:
    """Largest delta of a run; from its settings if it is unfinished."""
    settings = run.experiment.privacy
    deltas = [] if settings is None or settings.delta is None else [settings.delta]
    labels = run.experiment.evaluation.baseline_settings()
    for stated in (run.summary(), *(run.read_baseline(label) or {} for label in labels)):
        with suppress(ValueError, KeyError, TypeError):
            deltas.append(float(stated["privacy"]["delta"]))
    return max(deltas, default=_DELTA)
