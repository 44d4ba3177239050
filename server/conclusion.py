# SPDX-License-Identifier: Apache-2.0
"""The end of a run: the final evaluation, and the result with everything that is reported."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
from flwr.app import ArrayRecord

from fedrec.attacks.leaky_negatives import leak_words
from fedrec.components.registry import STEP, STRATEGY, resolve
from fedrec.data.adversary.words import adversary_words
from fedrec.data.cache import POPULATIONS
from fedrec.data.perturbation import perturbation_of
from fedrec.data.time_order import tied_share
from fedrec.evaluation.table import Evaluated
from fedrec.experiment.schema import Experiment
from fedrec.protocol.zero_copy import to_record
from fedrec.runs.folder import TIED_SHARE, RunFolder
from fedrec.runs.result import Result
from server.callbacks.base import Callback
from server.central import baseline_privacy
from server.checkpoint import State
from server.early_stopping import NAME, ending
from server.evaluation import Evaluator, has_fine_tuning
from server.extension import RunExtension
from strategies.base import CohortStrategy

Report = tuple[list[str], dict[str, Any]]


def conclude(
    run: RunFolder,
    state: State,
    *,
    evaluator: Evaluator,
    extensions: Sequence[RunExtension],
    callbacks: Callback,
    baselines: dict[str, dict[str, float]],
) -> Result:
    """Evaluate the parameters that a run ends with on all final users and write the result.

    Args:
        run: the run folder.
        state: after the last round.
        evaluator: asks the nodes.
        extensions: their reports are part of the result.
        callbacks: called on each event of the run.
        baselines: metrics of the centralised systems, for the result.

    Raises:
        ClientError: nodes failed.
        RunError: the run folder cannot be written.
    """
    kept, parameters = ending(state)
    arrays = to_record(parameters)
    started = time.perf_counter()
    before = _evaluated(run, arrays, kept, evaluator, callbacks, fine_tune=False)
    shared = time.perf_counter() - started
    tuned = has_fine_tuning(run.experiment)
    after = before
    if tuned:
        after = _evaluated(run, arrays, kept, evaluator, callbacks, fine_tune=True)
    reports = _reports(run, state, extensions)
    tables = {name: found for name, (_, found) in reports.items() if found}
    result = Result(
        experiment=run.experiment,
        folder=run.path,
        metrics=after.means(evaluator.metrics),
        before_fine_tuning=before.means(evaluator.metrics) if tuned else {},
        baselines=baselines,
        rounds=pd.DataFrame(state.rounds),
        users=after.users,
        groups=after.groups(),
        parameters=parameters,
        privacy=tuple(line for said, _ in reports.values() for line in said),
        baseline_users=run.baseline_users(),
        baseline_groups=run.baseline_groups(),
        early_stopping=tables.get(NAME, {}),
    )
    seconds = {
        "training": sum(timing["seconds"] for timing in state.timings),
        "evaluation-without-fine-tuning": shared,
        "evaluation": time.perf_counter() - started,
    }
    cost = _cost(state)
    if run.experiment.hides_cohorts:
        del seconds["training"], cost["peak-memory-mib"]
    times = {}
    data = POPULATIONS.population(run.experiment).interactions
    if data.times is not None and run.experiment.privacy is None:
        times = {TIED_SHARE: tied_share(data)}
    run.write_result(result, {"seconds": seconds, "cost": cost, **times, **tables})
    return result


def _cost(state: State) -> dict[str, float]:
    """Bytes of the parameters, of what was sent to and by the clients of all rounds, where the
    strategy counts them, and the peak memory of this process, in MiB."""
    size = sum(value.nbytes for value in state.parameters.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    sent = {
        name: sum(float(row[name]) for row in state.rounds)
        for name in ("bytes-up", "bytes-down")
        if all(name in row for row in state.rounds)
    }
    return {"parameter-bytes": size, **sent, "peak-memory-mib": peak}


def _reports(run: RunFolder, state: State, extensions: Sequence[RunExtension]) -> dict[str, Report]:
    """The privacy reports of a run by name: in words, and as JSON values."""
    perturbation = perturbation_of(run.experiment)
    perturbed = [] if perturbation is None else perturbation.words()
    return {
        "leak": _in_words(leak_words(run.experiment)),
        "perturb": _in_words(perturbed),
        "adversary": _in_words(_of_adversary(run.experiment)),
        "strategy": _in_words(_said(run.experiment, state)),
        **{one.name: one.report(state.round) for one in reversed(extensions)},
        "baselines-privacy": _in_words(list(baseline_privacy(run))),
    }


def _in_words(lines: list[str]) -> Report:
    return lines, {"in words": lines} if lines else {}


def _of_adversary(experiment: Experiment) -> list[str]:
    """The malicious clients of a simulation, in words."""
    if experiment.adversary is None:
        return []
    population = POPULATIONS.population(experiment)
    known = population.adversary
    attack = experiment.adversary.attack.name
    return [] if known is None else [adversary_words(attack, known, population.interactions)]


def _said(experiment: Experiment, state: State) -> list[str]:
    """The remarks of the strategy."""
    strategy = resolve(STRATEGY, experiment.strategy.name)
    if not issubclass(strategy, CohortStrategy):
        return []
    config = experiment.settings(STRATEGY)
    step = experiment.settings(STEP)
    return strategy.remarks(config, step, state.parameters, state.round)


def _evaluated(
    run: RunFolder,
    arrays: ArrayRecord,
    number: int,
    evaluator: Evaluator,
    callbacks: Callback,
    *,
    fine_tune: bool,
) -> Evaluated:
    callbacks.on_message("evaluating " + ("with fine-tuning" if fine_tune else "the shared model"))
    clients = evaluator.sampled_clients(run.experiment.evaluation.final_users)
    return evaluator.evaluate(
        arrays, number, clients, fine_tune=fine_tune, sums=True, progress=callbacks.on_evaluation
    )
