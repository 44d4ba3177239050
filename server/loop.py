# SPDX-License-Identifier: Apache-2.0
"""Rounds of a run, over Flower's `Strategy` and `Grid` interfaces, and their conclusion.

The loop depends on a grid only, so it is the same for the serial, Ray and Flower engines and for
real nodes. Flower's own `Strategy.start` is not used: it cannot resume, loses everything when a
round fails, and cannot stop early.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedrec.components.registry import MODEL, STEP, STRATEGY, resolve
from fedrec.components.sections import component_errors
from fedrec.data.client_data import tied_share
from fedrec.data.perturbation import perturbation_of
from fedrec.data.population import POPULATIONS, adversary_words
from fedrec.errors import RunError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import Experiment, leak_words
from fedrec.kernel.compiled import is_compiled
from fedrec.models.privrec import PrivRec
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.rng import seed_sequence
from fedrec.runs.folder import TIED_SHARE, Result, RunFolder
from fedrec.runtime.process import raise_if_interrupted
from server.callbacks.base import Callback, CallbackList, RunEvent
from server.central import baseline_privacy, check_federated, run_baselines
from server.checkpoint import (
    Checkpoints,
    RunExtension,
    State,
    as_before,
    make_strategy,
    own_memory,
    restore_strategy,
    strategy_state,
)
from server.cohort import Roster, SampledCohorts
from server.deployed.federation import federation_of
from server.early_stopping import NAME, EarlyStopping, ending
from server.evaluation import Evaluator, has_fine_tuning
from server.privacy.guard import guard_of
from server.privacy.personal_budgets import accounts_of
from strategies.base import (
    CohortStrategy,
    GeneratingStrategy,
    check_additive,
    check_enough_nodes,
    check_finite,
    check_same_parameters,
    parts_of,
)
from strategies.per_client import PerClientStrategy

log = logging.getLogger("fedrec")
_LARGE = 2**22  # numbers in a table
_STALE = 1.0  # seconds between writes of the tables, which may take longer than a round


class Loop:
    """Runs an experiment on a grid, from the newest checkpoint of its run folder to the end.

    Args:
        run: the run folder; contains the experiment.
        grid: connection to the nodes.
        callbacks: called on each event of the run.
    """

    def __init__(self, run: RunFolder, grid: Grid, callbacks: Sequence[Callback] = ()) -> None:
        self.run = run
        self.experiment = run.experiment
        self.callbacks = CallbackList(callbacks)
        check_federated(run.experiment)
        self.federation = federation_of(run, grid)
        self.cohorts = SampledCohorts(run.experiment, self.federation.members, grid=grid)
        self.strategy = make_strategy(run.experiment, self.cohorts)
        if self.federation.secure is not None:
            check_additive(self.strategy)
        self.guard = guard_of(run, self.strategy)
        budgets = accounts_of(run, self.strategy, self.cohorts)
        self.ledgers = [ledger for ledger in (self.guard, budgets) if ledger is not None]
        check_enough_nodes(self.strategy, len(self.federation.roster.nodes))
        timeline = self.federation.timeline(self.strategy)
        if timeline is not None:
            self.cohorts.follow(timeline)
        self.evaluator = Evaluator(
            run.experiment,
            self.federation,
            self.strategy if isinstance(self.strategy, GeneratingStrategy) else None,
        )
        self.evaluator.check_settings()
        config = run.experiment.early_stopping
        stopping = None if config is None else EarlyStopping(run.experiment, config, self.evaluator)
        extensions = (stopping, *self.ledgers, self.federation.dropped, timeline)
        self.extensions: list[RunExtension] = [e for e in extensions if e is not None]
        self.callbacks.observe(self.strategy)
        self.checkpoints = Checkpoints.of(run)
        self._written = -math.inf

    def execute(self) -> Result:
        """Fit the centralised systems, run the remaining rounds, evaluate, and write everything to
        the run folder.

        Raises:
            ClientError: clients failed, or the parameters are not finite.
            RunError: the run folder cannot be written.
        """
        state = self._start()
        for part in parts_of(self.strategy):
            if isinstance(part, CohortStrategy):
                part.check_parameters(state.parameters)
        run_baselines(self.run, self.callbacks)  # after the settings are checked
        if state.round == 0:
            warn_without_user_features(self.experiment, state.parameters)
        state = dataclasses.replace(state, parameters=self.federation.shared(state.parameters))
        steps = [section.name for section in self.experiment.steps().values()]
        announce_paths(self.federation.roster, steps, self._tell)
        self.callbacks.on_start(self.run, state.round + 1, self.experiment.rounds)
        for extension in self.extensions:
            for line in extension.announce(state.parameters):
                self._tell(line)
        state, stop = self._remaining(state)
        if stop or state.round < self.experiment.rounds:
            check_finite(state.parameters, state.round, self.strategy)
            state = dataclasses.replace(state, strategy=self._memory())
            self.checkpoints.save(state)  # the last round, regardless of checkpoint.every
        result = self._conclude(state)
        log.info("finished: %s", result.metrics)
        self.run.set_status("finished", state.round)
        self.callbacks.on_end(result)
        return result

    def _start(self) -> State:
        """State of the newest checkpoint, or before the first round."""
        state = self.checkpoints.latest()
        if state is None:
            for ledger in self.ledgers:
                ledger.begin(self.run.status()["round"])
            return State(0, self.federation.initial_parameters())
        names = {extension.name: extension for extension in self.extensions}
        restore_strategy(self.strategy, own_memory(state.strategy, "", names))
        for name, extension in names.items():
            extension.restore(own_memory(state.strategy, name, names))
        log.info("continuing after round %d", state.round)
        return state

    def _remaining(self, state: State) -> tuple[State, bool]:
        """Run the remaining rounds; returns the state after them, and True if a callback ended the
        run."""
        stop = False
        try:
            while state.round < self.experiment.rounds and not stop and self._goes_on(state.round):
                raise_if_interrupted()
                state = self._round(state)
                gc.collect(1)  # Flower's messages contain themselves, and hold arrays
                self._save(state)
                seconds = state.timings[-1]["seconds"] if state.timings else math.nan
                took = f" in {seconds:.2f} s" if state.timings else ""
                log.info("round %d%s: %s", state.round, took, state.rounds[-1])
                stop = self.callbacks.after_round(state.rounds[-1], seconds)
            if stop and state.round < self.experiment.rounds:
                names = ", ".join(self.callbacks.ended_by)
                self._tell(f"callback {names} ends the run after round {state.round}")
        except BaseException:
            with suppress(RunError):  # the error that ended the round matters more
                self._write(state)
            raise
        self._write(state)
        return state, stop

    def _goes_on(self, rounds: int) -> bool:
        """True if another round may follow; otherwise the reason is reported."""
        reasons = (extension.why_stop(rounds + 1) for extension in self.extensions)
        reason = next(filter(None, reasons), "")
        if reason:
            self._tell(f"{reason} after {rounds} rounds")
        return not reason

    def _tell(self, text: str) -> None:
        log.info(text)
        self.callbacks.on_event(RunEvent(text))

    def _round(self, state: State) -> State:
        """Run one round: configure, send, aggregate, evaluate."""
        started = time.perf_counter()
        number = state.round + 1
        if self.federation.refresh_roster():
            self.cohorts.joined(self.federation.members)
        arrays, metrics = self._train(number, to_record(state.parameters))
        trained = time.perf_counter()
        arrays, parameters = as_before(arrays, state.parameters)
        # Large tables are checked only in rounds with a checkpoint: a check takes as long as a
        # short round.
        checked = {n: v for n, v in parameters.items() if self._due(number) or v.size < _LARGE}
        check_finite(checked, number, self.strategy)
        row: dict[str, Any] = {"round": number, **metrics, **self._evaluate_sample(arrays, number)}
        for extension in self.extensions:
            row |= extension.after_round(number, arrays)
        ended = time.perf_counter()
        timing = {
            "round": number,
            "seconds": ended - started,
            "train": trained - started,
            "evaluate": ended - trained,
        }
        memory = self._memory() if self._due(number) else {}
        # how long a round takes depends on who is in it
        timings = [] if self.experiment.hides_cohorts else [*state.timings, timing]
        return State(number, parameters, memory, [*state.rounds, row], timings)

    def _memory(self) -> dict[str, np.ndarray]:
        """State of the strategy and of the extensions."""
        memory = strategy_state(self.strategy)
        for extension in self.extensions:
            named = extension.memory().items()
            memory |= {f"{extension.name}:{name}": array for name, array in named}
        return memory

    def _train(self, number: int, arrays: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        # Flower's own strategies draw nodes from Python's global generator: this makes them a
        # function of the round too.
        random.seed(int(seed_sequence(self.experiment.seed, "flower", number).generate_state(1)[0]))
        grid = self.federation.grid
        with component_errors(STRATEGY.name, self.strategy, f"in round {number}, before training"):
            messages = list(self.strategy.configure_train(number, arrays, ConfigRecord(), grid))
        theta = zero_copy_arrays(arrays)  # before the arrays are sent, and converted to bytes
        for ledger in self.ledgers:
            ledger.before_upload(number)
        replies = self.federation.train(messages, theta)
        with component_errors(STRATEGY.name, self.strategy, f"in round {number}, after training"):
            updated, metrics = self.strategy.aggregate_train(number, replies)
            after = arrays if updated is None else updated
            check_same_parameters(self.strategy, number, after, arrays)
        if self.guard is not None:
            self.guard.check_charged(number)
        return after, dict(metrics or {})

    def _evaluate_sample(self, arrays: ArrayRecord, number: int) -> dict[str, float]:
        every = self.experiment.evaluation.every
        if not every or (number % every and number != self.experiment.rounds):
            return {}
        clients = self.evaluator.sampled_clients(self.experiment.evaluation.users)
        evaluator = self.evaluator
        return evaluator.evaluate(arrays, number, clients).means(evaluator.metrics)

    def _save(self, state: State) -> None:
        """Save a round: a checkpoint and the status if one is due, and tables if they are more than
        a second old."""
        due = self._due(state.round)
        if due:
            self.checkpoints.save(state)
        if time.monotonic() - self._written > _STALE:
            self._write(state)
        elif due:
            self.run.set_status("running", state.round)

    def _due(self, number: int) -> bool:
        """True if a checkpoint is written after a round."""
        return number % self.experiment.checkpoint.every == 0 or number == self.experiment.rounds

    def _write(self, state: State) -> None:
        self.run.write_rounds(state.rounds, state.timings)
        self.run.set_status("running", state.round)
        self._written = time.monotonic()

    def _conclude(self, state: State) -> Result:
        """Evaluate the final parameters, those after the last round or of the best one, on all
        final users, and write the result with all reports.

        Raises:
            ClientError: nodes failed.
            RunError: the run folder cannot be written.
        """
        run = self.run
        metrics = self.evaluator.metrics
        best_round, parameters = ending(state)
        arrays = to_record(parameters)
        started = time.perf_counter()
        before = self._evaluate_all(arrays, best_round, fine_tune=False)
        shared = time.perf_counter() - started
        tuned = has_fine_tuning(self.experiment)
        after = self._evaluate_all(arrays, best_round, fine_tune=True) if tuned else before
        reports = self._reports(state)
        result = run.result(
            metrics=after.means(metrics),
            before_fine_tuning=before.means(metrics) if tuned else {},
            rounds=pd.DataFrame(state.rounds),
            users=after.users,
            groups=after.groups(),
            parameters=parameters,
            privacy=tuple(line for table in reports.values() for line in table["in words"]),
            early_stopping=reports.get(NAME, {}),
        )
        seconds = {
            "training": sum(timing["seconds"] for timing in state.timings),
            "evaluation-without-fine-tuning": shared,
            "evaluation": time.perf_counter() - started,
        }
        cost = _cost(state)
        if self.experiment.hides_cohorts:
            del seconds["training"], cost["peak-memory-mib"]
        run.write_result(
            result, {"seconds": seconds, "cost": cost, **_tied_times(self.experiment), **reports}
        )
        return result

    def _evaluate_all(self, arrays: ArrayRecord, number: int, *, fine_tune: bool) -> Evaluated:
        what = "with fine-tuning" if fine_tune else "the shared model"
        self.callbacks.on_event(RunEvent(f"evaluating {what}"))
        clients = self.evaluator.sampled_clients(self.experiment.evaluation.final_users)
        return self.evaluator.evaluate(
            arrays,
            number,
            clients,
            fine_tune=fine_tune,
            sums=True,
            progress=self.callbacks.evaluated,
        )

    def _reports(self, state: State) -> dict[str, dict[str, Any]]:
        """Reports of a run by name, as JSON values, with their sentences `in words`."""
        experiment = self.experiment
        perturbation = perturbation_of(experiment)
        strategy = self.strategy
        remarks = []
        if isinstance(strategy, PerClientStrategy):
            step = experiment.settings(STEP)
            remarks = strategy.remarks(step, state.parameters, state.round)
        statements = {
            "leak": leak_words(experiment),
            "perturb": [] if perturbation is None else perturbation.words(),
            "adversary": _adversary(experiment),
            "strategy": remarks,
        }
        reports = {
            **{name: {"in words": lines} for name, lines in statements.items() if lines},
            **{e.name: e.report(state.round) for e in reversed(self.extensions)},
            "baselines-privacy": baseline_privacy(self.run),
        }
        return {name: table for name, table in reports.items() if table}


def _adversary(experiment: Experiment) -> list[str]:
    """Describe the malicious clients of a simulation."""
    if experiment.adversary is None:
        return []
    population = POPULATIONS.population(experiment)
    known = population.adversary
    attack = experiment.adversary.attack.name
    return [] if known is None else [adversary_words(attack, known, population.interactions)]


def _cost(state: State) -> dict[str, float]:
    """Cost of a run: bytes of the parameters, bytes sent to and by the clients of all rounds, if
    the strategy counts them, and peak memory of this process, in MiB."""
    size = sum(value.nbytes for value in state.parameters.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    sent = {
        name: sum(float(row[name]) for row in state.rounds)
        for name in ("bytes-up", "bytes-down")
        if all(name in row for row in state.rounds)
    }
    return {"parameter-bytes": size, **sent, "peak-memory-mib": peak}


def _tied_times(experiment: Experiment) -> dict[str, float]:
    """Share of rows with tied times; reported only for a user's own table without privacy."""
    if experiment.dataset.name != "table" or experiment.privacy is not None:
        return {}
    data = POPULATIONS.population(experiment).interactions
    return {} if data.times is None else {TIED_SHARE: tied_share(data)}


# Reports the nodes' training paths, and compiles what is not in the cache.


_COMPILED = {
    "train_clients": "the kernel, once on this machine (half a minute to a minute)",
    "train_additive": "the kernel of FedRAP, once on this machine (about 4 s)",
}
"""Descriptions by name of a compiled function."""


def announce_paths(roster: Roster, steps: Iterable[str], tell: Callable[[str], None]) -> None:
    """Report the training path of each step, if nodes report it.

    Args:
        roster: the nodes, with the reply of each.
        steps: names of the experiment's steps; other reported steps compile nothing.
        tell: prints a line for the user.
    """
    reported = dict.fromkeys(
        pair for presence in roster.presences for pair in presence.paths.items()
    )
    if not reported:
        return
    tell("training paths: " + ", ".join(f"step {step}: {path}" for step, path in reported))
    # in this process, before several nodes of this machine do it at once; other paths need not
    # wait for the import of Numba
    in_kernel = [step for step in steps if (step, "kernel") in reported]
    needed = {"train_additive" if step == "fedrap" else "train_clients" for step in in_kernel}
    for name, text in _COMPILED.items():
        if name in needed and not is_compiled(name):
            from fedrec.training.kernel import compile_ahead

            tell(f"compiling {text}")
            compile_ahead(name)


# Warning before training if a model represents users by features that the data lack.


def warn_without_user_features(experiment: Experiment, parameters: Iterable[str]) -> None:
    """Log a warning if the shared model would rank alike for all users.

    Args:
        experiment: the experiment; no warning with `model.features = false`.
        parameters: names of the model's parameters.
    """
    model = resolve(MODEL, experiment.model.name)
    chosen = not getattr(experiment.settings(MODEL), "features", True)
    if not issubclass(model, PrivRec) or chosen:
        return
    if not any(name.startswith("user.") for name in parameters):
        log.warning(
            "model %r represents users by features, and these data have none: the shared model"
            " ranks alike for all users. Add dataset.user-features, or use a model without"
            " features, such as item-weights (fedrec run --data TABLE.csv) or mf",
            experiment.model.name,
        )
