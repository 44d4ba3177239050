# SPDX-License-Identifier: Apache-2.0
"""Centralised systems of a run, fitted sequentially; each result is saved in the run folder.

A resumed run continues with the next system. A private system that was interrupted while it was
fitted is fitted again, with the same noise: it is the same release and costs nothing more.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fedrec.baselines.base import Baseline, TooLarge
from fedrec.baselines.private.ranking import PrivateBaseline
from fedrec.data.population import POPULATIONS, check_independent_clients, sample_clients
from fedrec.device import resolve_device
from fedrec.evaluation.central import CentralEvaluation, make_baseline, stated_privacy
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Ledger, Report
from fedrec.privacy.accounting.events import Event
from fedrec.privacy.statement import SIMULATION, sentence
from fedrec.report.privacy_total import systems_together
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.files import finite
from server.callbacks import CallbackList

log = logging.getLogger("fedrec")
LEDGER = "privacy.jsonl"


def run_baselines(run: RunFolder, callback_list: CallbackList) -> None:
    """Run the experiment's baselines once per run folder."""
    settings = run.experiment.evaluation.baseline_settings()
    left = [label for label in settings if run.read_baseline(label) is None]
    if not left:  # as on the server of a deployment, which has no data to evaluate on
        return
    callback_list.event("fitting baselines")
    evaluation = _evaluation(run.experiment)
    for label, options in settings.items():
        _check_independent(run.experiment, label, make_baseline(label, options))
    for number, label in enumerate(settings, 1):
        if label in left:
            callback_list.event(f"system {number}/{len(settings)}: {label}", label)
            try:
                _measured(run, evaluation, label, settings[label], callback_list)
            except TooLarge as error:
                log.warning("baseline %s is left out: %s", label, error.got)


def baseline_privacy(run: RunFolder) -> dict[str, Any]:
    """Report of the private baselines, and of all private systems of the run together, `in words`;
    empty without any."""
    saved = map(run.read_baseline, run.experiment.evaluation.baseline_settings())
    known = [table for table in saved if table is not None and table["metrics"]]
    lines = [line for table in known for line in table.get("privacy", {}).get("in words", ())]
    return {"in words": [*lines, *systems_together(run)]} if lines else {}


def central_result(run: RunFolder, callback_list: CallbackList) -> Result:
    """Fit the centralised systems of an experiment that has no others, and finish it."""
    run_baselines(run, callback_list)
    privacy = baseline_privacy(run)
    result = run.result(
        metrics={},
        before_fine_tuning={},
        rounds=pd.DataFrame(),
        users=pd.DataFrame(index=pd.Index([], dtype="int64", name="client")),
        groups=pd.DataFrame(index=pd.Index([], name="group")),
        privacy=tuple(privacy.get("in words", ())),
    )
    evaluated = next(iter(result.baseline_users.values()), result.users)
    result = replace(result, users=evaluated[[]])
    run.write_result(result, {"baselines-privacy": privacy} if privacy else {})
    run.set_status("finished", 0)
    callback_list.tell("on_end", result)
    return result


def _check_independent(experiment: Experiment, label: str, baseline: Baseline) -> None:
    """Check that the stated privacy of a baseline holds on the data.

    Raises:
        ExperimentError: rows of a client affect those of others.
    """
    if isinstance(baseline, PrivateBaseline):
        if baseline.config.noise:
            check_independent_clients(experiment, baseline.config.adjacency, f"baseline {label}")
    elif type(baseline).stated is not Baseline.stated:
        check_independent_clients(experiment, "replace-one", f"baseline {label}")


def _measured(
    run: RunFolder,
    evaluation: CentralEvaluation,
    label: str,
    options: Mapping[str, Any],
    callback_list: CallbackList,
) -> None:
    """Fit and evaluate one baseline, and save its results; without metrics if it does not support
    the experiment's task."""
    experiment = run.experiment
    device = resolve_device(experiment.engine.device)
    baseline = make_baseline(label, options, seed=experiment.seed, device=device)
    ledger = None
    if isinstance(baseline, PrivateBaseline):
        ledger = Ledger(run.baseline_folder(label) / LEDGER)
        baseline.charge = _charging(ledger)
    seconds: dict[str, float] = {}
    evaluated = Evaluated.joined([])
    if evaluation.takes(baseline):
        started = time.perf_counter()
        evaluation.fit(baseline)
        fitted = time.perf_counter()
        evaluated = evaluation.evaluate(baseline, callback_list.evaluated)
        seconds = {"fit": fitted - started, "evaluation": time.perf_counter() - fitted}
    metrics = evaluated.means(evaluation.metrics) | stated_privacy(label, baseline)
    saved: dict[str, Any] = {"metrics": metrics, "seconds": seconds}
    if ledger is not None and isinstance(baseline, PrivateBaseline):
        saved["privacy"] = _account(label, ledger, baseline)
    run.write_baseline(label, saved, evaluated.users, evaluated.groups())
    log.info("baseline %s in %.2f s: %s", label, sum(seconds.values()), metrics)


def _evaluation(experiment: Experiment) -> CentralEvaluation:
    population = POPULATIONS.population(experiment)
    settings = experiment.evaluation
    evaluated = population.evaluated_clients(settings.held_out)
    clients = sample_clients(evaluated, settings.final_users, experiment.seed)
    return CentralEvaluation(population, settings, clients=clients)


def _charging(ledger: Ledger) -> Callable[[int, Event], None]:
    """Make a function that charges only releases that were not charged before."""
    charged = {(line.round_number, line.event) for line in ledger.charges}

    def charge(number: int, event: Event) -> None:
        if (number, event) not in charged:
            ledger.charge(number, event)

    return charge


def _account(label: str, ledger: Ledger, baseline: PrivateBaseline) -> dict[str, Any]:
    """Privacy cost of a private baseline by its ledger, as JSON values."""
    report: Report = ledger.spent(baseline.config.delta)
    line = f"{label}: {sentence(report, baseline.config.adjacency)} {SIMULATION}"
    return {
        "epsilon": finite(report.epsilon),
        "delta": report.delta,
        "releases": report.events,
        "in words": [line],
    }
