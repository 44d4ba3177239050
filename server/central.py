# SPDX-License-Identifier: Apache-2.0
"""The centralised systems of a run, one after the other; the result of each is saved in the run
folder.

A resumed run continues with the next system. A private system that was interrupted while it was
fitted is fitted again. In mode `reproducible` the noise is then the same, so it is the same release
and costs nothing more; in mode `secure` the noise differs, and the release is charged again.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedrec.baselines.base import Baseline, RatingBaseline
from fedrec.baselines.private._private import PrivateBaseline
from fedrec.baselines.protocol import (
    RankingProtocol,
    RatingProtocol,
    Settings,
    make_baseline,
    settings_that_fit,
    stated_privacy,
)
from fedrec.data.cache import POPULATIONS
from fedrec.data.population import Population, sample_clients
from fedrec.device import resolve_device
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.metrics.rating import rating_errors, rating_errors_by_user
from fedrec.privacy.accounting.accountant import Report
from fedrec.privacy.accounting.events import Event
from fedrec.privacy.caveats import SIMULATION
from fedrec.privacy.explain import sentence
from fedrec.privacy.ledger import Ledger
from fedrec.report.privacy_total import systems_together
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from server.callbacks.callback_list import CallbackList

log = logging.getLogger("fedrec")
LEDGER = "privacy.jsonl"
Measured = tuple[dict[str, float], pd.DataFrame, dict[str, float]]
"""Means over users, one row per user, and seconds by activity."""


def run_baselines(run: RunFolder, callback_list: CallbackList) -> dict[str, dict[str, float]]:
    """Metrics of the experiment's baselines, by label; each is computed once per run folder."""
    done = run.read_baselines()
    if done is not None:
        return done
    # the server of a deployment has no data to measure on
    if not run.experiment.evaluation.baselines:
        return {}
    callback_list.on_message("fitting baselines")
    metrics = {}
    evaluator = _evaluator(run.experiment)
    settings = evaluator.feasible(callback_list)
    for number, (label, options) in enumerate(settings.items(), 1):
        kept = run.read_baseline(label)
        if kept is None:
            callback_list.on_baseline(label, number, len(settings))
            kept = evaluator.measure(run, label, options, callback_list)
        # a baseline without rating predictions has no metrics in rating experiments
        if kept["metrics"]:
            metrics[label] = kept["metrics"]
    run.write_baselines(metrics)
    return metrics


def baseline_privacy(run: RunFolder) -> tuple[str, ...]:
    """Privacy cost of the private baselines, one paragraph per line, and of all private systems of
    the run together; empty without any."""
    found = [run.read_baseline(label) or {} for label in run.read_baselines() or {}]
    said = tuple(line for kept in found for line in kept.get("privacy", {}).get("in words", ()))
    return (*said, *systems_together(run)) if said else ()


def central_result(
    run: RunFolder, metrics: dict[str, dict[str, float]], callback_list: CallbackList
) -> Result:
    """Finish an experiment of centralised systems alone."""
    privacy = baseline_privacy(run)
    users = run.baseline_users()
    index = next(iter(users.values())).index if users else pd.Index([], dtype=np.int64)
    result = Result(
        experiment=run.experiment,
        folder=run.path,
        metrics={},
        before_fine_tuning={},
        baselines=metrics,
        rounds=pd.DataFrame(),
        users=pd.DataFrame(index=index),
        groups=pd.DataFrame(index=pd.Index([], name="group")),
        privacy=privacy,
        baseline_users=users,
    )
    run.write_result(result, {"baselines-privacy": {"in words": list(privacy)}} if privacy else {})
    run.set_status("finished", 0)
    callback_list.on_end(result)
    return result


def refuse_central(experiment: Experiment) -> None:
    """Refuse an experiment without a federated system where one is needed.

    Raises:
        ExperimentError: it has none.
    """
    if not experiment.federated:
        raise ExperimentError(
            f"experiment {experiment.name!r} has no federated system",
            expected="rounds = 1 or more",
            got="centralised systems alone",
            fix="`fedrec run` runs it; attacks, audits and deployments need a federated system",
        )


class _Evaluator(ABC):
    """The data and protocol that all baselines of a run are evaluated on.

    Args:
        experiment: the resolved experiment.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._device = resolve_device(experiment.engine.device)

    def feasible(self, callback_list: CallbackList) -> Settings:
        """Settings of the systems to measure, by label."""
        return self.experiment.evaluation.baseline_settings()

    def measure(
        self, run: RunFolder, label: str, options: Mapping[str, Any], callback_list: CallbackList
    ) -> dict[str, Any]:
        """Fit and evaluate one baseline, and save its results."""
        baseline = make_baseline(label, options, seed=self.experiment.seed, device=self._device)
        ledger = None
        if isinstance(baseline, PrivateBaseline):
            ledger = Ledger(run.baseline_folder(label) / LEDGER, baseline.config.backend)
            baseline.charge = _Charges(ledger, again=baseline.config.mode == "secure")
        metrics, users, seconds = self._measured(baseline, callback_list)
        metrics |= stated_privacy(label, baseline)
        found: dict[str, Any] = {"metrics": metrics, "seconds": seconds}
        if ledger is not None and isinstance(baseline, PrivateBaseline):
            found["privacy"] = _account(label, ledger, baseline)
        run.write_baseline(label, found, users)
        log.info("baseline %s in %.2f s: %s", label, sum(seconds.values()), metrics)
        return found

    @abstractmethod
    def _measured(self, baseline: Baseline, callback_list: CallbackList) -> Measured:
        """Fit a baseline and evaluate it."""


class _RankingEvaluator(_Evaluator):
    def __init__(self, experiment: Experiment, population: Population) -> None:
        super().__init__(experiment)
        settings = experiment.evaluation
        clients = _clients(experiment, population)
        self._protocol = RankingProtocol(
            population,
            held_out=settings.held_out,
            ks=settings.ks,
            clients=clients,
            protocol=settings.protocol,
            masked=settings.masked,
            sampled=settings.sampled_items,
        )

    def feasible(self, callback_list: CallbackList) -> Settings:
        """Settings of the systems to evaluate, by label; systems for which the data are too large
        are skipped, with a line in the log."""
        training = self._protocol.training
        return settings_that_fit(
            super().feasible(callback_list),
            training.num_users,
            training.num_items,
            lambda line: _say(line, callback_list),
        )

    def _measured(self, baseline: Baseline, callback_list: CallbackList) -> Measured:
        started = time.perf_counter()
        self._protocol.fit(baseline)
        fitted = time.perf_counter()
        statistics = self._protocol.statistics()
        values = self._protocol.rank(baseline, callback_list.on_evaluation, statistics)
        seconds = {"fit": fitted - started, "evaluation": time.perf_counter() - fitted}
        users = pd.DataFrame(
            {name: column.numpy() for name, column in values.items()}, index=self._protocol.clients
        )
        users.index.name = "client"
        means = {name: float(column.nanmean()) for name, column in values.items()}
        return means | (statistics.result() if statistics is not None else {}), users, seconds


class _RatingEvaluator(_Evaluator):
    def __init__(self, experiment: Experiment, population: Population) -> None:
        super().__init__(experiment)
        clients = _clients(experiment, population)
        self._protocol = RatingProtocol(
            population, held_out=experiment.evaluation.held_out, clients=clients
        )

    def _measured(self, baseline: Baseline, callback_list: CallbackList) -> Measured:
        if not isinstance(baseline, RatingBaseline):
            return {}, pd.DataFrame(), {}
        started = time.perf_counter()
        clients = self._protocol.clients
        users, predicted, actual = self._protocol.measure(baseline)
        place = np.searchsorted(clients, users)
        by_user = rating_errors_by_user(predicted, actual, place, len(clients))
        table = {**by_user, "rows": np.bincount(place, minlength=len(clients))}
        frame = pd.DataFrame(table, index=pd.Index(clients, name="client"))
        return rating_errors(predicted, actual), frame, {"fit": time.perf_counter() - started}


def _say(line: str, callback_list: CallbackList) -> None:
    log.warning(line)
    callback_list.on_message(line)


def _evaluator(experiment: Experiment) -> _Evaluator:
    population = POPULATIONS.population(experiment)
    return (_RatingEvaluator if experiment.task == "rating" else _RankingEvaluator)(
        experiment, population
    )


def _clients(experiment: Experiment, population: Population) -> np.ndarray:
    settings = experiment.evaluation
    return sample_clients(
        population.evaluated_clients(settings.held_out), settings.final_users, experiment.seed
    )


class _Charges:
    """Writes charges to a ledger.

    Args:
        ledger: of one baseline.
        again: whether a release that was charged before is charged again.
    """

    def __init__(self, ledger: Ledger, *, again: bool) -> None:
        self._ledger = ledger
        self._known = (
            set() if again else {(charge.round_number, charge.event) for charge in ledger.charges}
        )

    def __call__(self, number: int, event: Event) -> None:
        if (number, event) not in self._known:
            self._ledger.charge(number, event)


def _account(label: str, ledger: Ledger, baseline: PrivateBaseline) -> dict[str, Any]:
    """Privacy cost of a private baseline by its ledger, as JSON values."""
    report: Report = ledger.spent(baseline.config.delta)
    epsilon: float | str = report.epsilon if math.isfinite(report.epsilon) else "inf"
    line = f"{label}, {baseline.config.adjacency}: {sentence(report, baseline.config.adjacency)}"
    if baseline.config.mode == "reproducible":
        line = f"{line} {SIMULATION}"
    return {
        "epsilon": epsilon,
        "delta": report.delta,
        "releases": report.events,
        "in words": [line],
    }
