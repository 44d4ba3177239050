# SPDX-License-Identifier: Apache-2.0
"""Execution of a run folder on a grid, Flower's ServerApp, and the rounds of a run."""

import dataclasses
import gc
import logging
import math
import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from threadpoolctl import threadpool_limits

from fedrec.components.registry import MODEL, STRATEGY
from fedrec.components.sections import component_errors, finite, named, refuse_other_arrays
from fedrec.data.perturbation import perturbation_of
from fedrec.data.population import POPULATIONS, adversary_words
from fedrec.errors import ClientError, ExperimentError, RunError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import Experiment, from_run_config, leak_words
from fedrec.kernel.compiled import is_compiled
from fedrec.models.privrec import PrivRecConfig
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.rng import seed_sequence
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import default_folder
from fedrec.runtime.files import parse_json
from fedrec.runtime.process import interrupting, raise_if_interrupted
from server.callbacks import Callback, CallbackList
from server.central import baseline_privacy, central_result, run_baselines
from server.checkpoint import Checkpoints, RunExtension, State, make_strategy, memory_of, restore
from server.cohort import SampledCohorts
from server.deployed.federation import DeployedGrid, federation_of
from server.evaluation import NAME, EarlyStopping, Evaluator, ending
from server.federation import node_names
from server.nodes import Roster, name_nodes
from server.privacy.guard import guard_of
from server.privacy.personal_budgets import accounts_of
from strategies.base import CohortStrategy, parts_of
from strategies.per_client import MetaMfStrategy, PerClientStrategy

# One execution of a run folder on a grid: baselines, rounds, evaluation, and the final status, also
# after errors.


def execute(run: RunFolder, grid: Grid, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of a run folder on a grid.

    Raises:
        FedrecError: an error that the user can fix; the run folder stays resumable.
        KeyboardInterrupt: the user stopped the run; likewise.
    """
    with _status(run, node_names(grid)):
        return _Loop(run, grid, callbacks).execute()


def execute_central(run: RunFolder, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of an experiment with centralised systems only, in this process.

    Raises:
        FedrecError: an error that the user can fix; the run folder stays resumable.
        KeyboardInterrupt: the user stopped the run; likewise.
    """
    with _status(run), _threads(run.experiment.engine.threads):
        return central_result(run, CallbackList(run.experiment, callbacks))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of threads of torch and of the BLAS libraries of numpy and scipy, at most
    OMP_NUM_THREADS, because threads that wait for a busy core cost more than they gain."""
    before = torch.get_num_threads()
    wanted = number or before
    bound = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(wanted, int(bound)) if bound.isdecimal() and int(bound) else wanted
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _status(run: RunFolder, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Lock the folder, write its log, with these names of nodes, and record the final status."""
    with run.lock(), _log_to(run, names or {}), interrupting():
        run.set_status("running", run.status()["round"])
        try:
            yield
        except KeyboardInterrupt:
            run.set_status("interrupted", run.status()["round"])
            raise
        except BaseException as error:
            logging.getLogger("fedrec").error("%s", error)
            run.set_status("failed", run.status()["round"])
            raise


@contextmanager
def _log_to(run: RunFolder, names: Mapping[str, str]) -> Iterator[None]:
    """Write the log of a run; if cohorts are secret, readable by its owner only, as it names failed
    nodes, and without the time of day, as rounds take longer with some clients."""
    logger = logging.getLogger("fedrec")
    times = None
    if run.experiment.hides_cohorts:
        run.log_file.touch(mode=0o600)
        run.log_file.chmod(0o600)
        times = "%Y-%m-%d --:--:--,---"  # as wide as a time
    handler = logging.FileHandler(run.log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", times))
    handler.addFilter(partial(name_nodes, names=names))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


# The Flower ServerApp: runs the experiment that the run configuration names, on Flower's own grid.
#
# Run configuration: `experiment` (TOML file or shipped name), `overrides` (like `--set`, separated
# by `;`), `output` (absolute path of the run folder, new or to be continued; default: below the
# runs directory).

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the end; errors are raised, so that Flower marks its run as failed."""
    run = _run_folder(context)
    logging.getLogger("fedrec").info("run folder %s", run.path)
    deployed = bool(context.run_config.get("deployment"))
    most = int(context.run_config.get("most-clients", 0))
    names = parse_json(str(context.run_config.get("node-names") or "{}"))
    result = execute(run, DeployedGrid(grid, most or None, names) if deployed else grid)
    logging.getLogger("flwr").info("fedrec: %s", result.metrics)


def _run_folder(context: Context) -> RunFolder:
    output = str(context.run_config.get("output", "") or "")
    if output and (Path(output) / "run.json").is_file():
        return RunFolder(Path(output))
    experiment = from_run_config(context.run_config)
    return RunFolder.create(experiment, Path(output) if output else default_folder(experiment))


# Rounds of a run, over Flower's `Strategy` and `Grid` interfaces, and their conclusion.
#
# The loop depends on a grid only, so it is the same for the serial, Ray and Flower engines and for
# real nodes. Flower's own `Strategy.start` is not used: it cannot resume, loses everything when a
# round fails, and cannot stop early.

log = logging.getLogger("fedrec")
_LARGE = 2**22  # numbers in a table
_STALE = 1.0  # seconds between writes of the tables, which may take longer than a round


class _Loop:
    """Runs an experiment on a grid, from the newest checkpoint of its run folder to the end.

    Args:
        run: the run folder; contains the experiment.
        grid: connection to the nodes.
        callbacks: called on each event of the run.
    """

    def __init__(self, run: RunFolder, grid: Grid, callbacks: Sequence[Callback] = ()) -> None:
        self.run = run
        self.experiment = run.experiment
        self.callbacks = CallbackList(run.experiment, callbacks)
        if not run.experiment.federated:
            raise ExperimentError(
                f"experiment {run.experiment.name!r} has no federated system",
                expected="rounds = 1 or more",
                fix="`fedrec run` runs it; attacks, audits and deployments need a federated system",
            )
        self.federation = federation_of(run, grid)
        timeline = self.federation.timeline
        self.cohorts = SampledCohorts(
            run.experiment, self.federation.members, grid=grid, timeline=timeline
        )
        self.strategy = make_strategy(run.experiment, self.cohorts)
        self.federation.check_strategy(self.strategy)
        self.guard = guard_of(run, self.strategy)
        budgets = accounts_of(run, self.strategy, self.cohorts)
        self.ledgers = [ledger for ledger in (self.guard, budgets) if ledger is not None]
        self.evaluator = Evaluator(
            run.experiment,
            self.federation,
            self.strategy if isinstance(self.strategy, MetaMfStrategy) else None,
        )
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
            _warn_without_user_features(self.experiment, state.parameters)
        state = dataclasses.replace(state, parameters=self.federation.shared(state.parameters))
        steps = [section.name for section in self.experiment.steps().values()]
        _announce_paths(self.federation.roster, steps, self._tell)
        self.callbacks.tell("on_start", self.run, state.round + 1, self.experiment.rounds)
        for extension in self.extensions:
            for line in extension.announce(state.parameters):
                self._tell(line)
        state, stop = self._remaining(state)
        if stop or state.round < self.experiment.rounds:
            _check_finite(state.parameters, state.round, self.strategy)
            state = dataclasses.replace(state, strategy=memory_of(self.strategy, self.extensions))
            self.checkpoints.save(state)  # the last round, regardless of checkpoint.every
        result = self._conclude(state)
        log.info("finished: %s", result.metrics)
        self.run.set_status("finished", state.round)
        self.callbacks.tell("on_end", result)
        return result

    def _start(self) -> State:
        """State of the newest checkpoint, or before the first round."""
        state = self.checkpoints.latest()
        if state is None:
            for ledger in self.ledgers:
                ledger.begin(self.run.status()["round"])
            return State(0, self.federation.initial_parameters())
        restore(state.strategy, self.strategy, self.extensions)
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
        self.callbacks.event(text)

    def _round(self, state: State) -> State:
        """Run one round: configure, send, aggregate, evaluate."""
        started = time.perf_counter()
        number = state.round + 1
        if self.federation.refresh_roster():
            self.cohorts.joined(self.federation.members)
        arrays, metrics = self._train(number, to_record(state.parameters))
        trained = time.perf_counter()
        arrays, parameters = _as_before(arrays, state.parameters)
        # Large tables are checked only in rounds with a checkpoint: a check takes as long as a
        # short round.
        checked = {n: v for n, v in parameters.items() if self._due(number) or v.size < _LARGE}
        _check_finite(checked, number, self.strategy)
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
        memory = memory_of(self.strategy, self.extensions) if self._due(number) else {}
        # how long a round takes depends on who is in it
        timings = [] if self.experiment.hides_cohorts else [*state.timings, timing]
        return State(number, parameters, memory, [*state.rounds, row], timings)

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
            _check_same_parameters(self.strategy, number, after, arrays)
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
        tuned = self.evaluator.fine_tunes
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
        run.write_result(result, {"seconds": seconds, "cost": cost, **reports})
        return result

    def _evaluate_all(self, arrays: ArrayRecord, number: int, *, fine_tune: bool) -> Evaluated:
        what = "with fine-tuning" if fine_tune else "the shared model"
        self.callbacks.event(f"evaluating {what}")
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
        remarks = strategy.remarks if isinstance(strategy, PerClientStrategy) else ()
        statements = {
            "leak": leak_words(experiment),
            "perturb": [] if perturbation is None else perturbation.words(),
            "adversary": _adversary(experiment),
            "strategy": list(remarks),
        }
        reports = {
            **{name: {"in words": lines} for name, lines in statements.items() if lines},
            **{e.name: e.report(state.round) for e in reversed(self.extensions)},
            "baselines-privacy": baseline_privacy(self.run),
        }
        return {name: table for name, table in reports.items() if table}


def _check_finite(parameters: Mapping[str, np.ndarray], number: int, strategy: Strategy) -> None:
    """Check that no parameter has NaN or infinity after a round.

    Raises:
        ClientError: one has.
    """
    for name, array in parameters.items():
        if not finite(array):
            raise ClientError(
                f"training diverged in round {number}",
                got=f"NaN or infinity in {name!r} from {named(STRATEGY.name, strategy)}",
                fix="lower step.learning-rate or strategy.server-lr, or fix that file; the previous"
                " checkpoint is intact",
            )


def _check_same_parameters(
    strategy: Strategy, number: int, after: ArrayRecord, before: ArrayRecord
) -> None:
    """Check that aggregated parameters have the names and shapes of those before the round.

    Raises:
        ComponentError: they differ.
    """
    shapes = {name: tuple(array.shape) for name, array in before.items()}
    refuse_other_arrays(STRATEGY.name, strategy, f"in round {number}", after, shapes)


def _as_before(
    arrays: ArrayRecord, before: Mapping[str, np.ndarray]
) -> tuple[ArrayRecord, dict[str, np.ndarray]]:
    """Restore the types of aggregated parameters: some of Flower's strategies (FedAdam) turn
    float32 into float64."""
    parameters = zero_copy_arrays(arrays)
    if all(value.dtype == before[name].dtype for name, value in parameters.items()):
        return arrays, parameters
    parameters = {name: v.astype(before[name].dtype) for name, v in parameters.items()}
    return to_record(parameters), parameters


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


# Reports the nodes' training paths, and compiles what is not in the cache.


_COMPILED = {
    "train_clients": "the kernel, once on this machine (half a minute to a minute)",
    "train_additive": "the kernel of FedRAP, once on this machine (about 4 s)",
}
"""Descriptions by name of a compiled function."""


def _announce_paths(roster: Roster, steps: Iterable[str], tell: Callable[[str], None]) -> None:
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


def _warn_without_user_features(experiment: Experiment, parameters: Iterable[str]) -> None:
    """Log a warning if the shared model would rank alike for all users.

    Args:
        experiment: the experiment; no warning with `model.features = false`.
        parameters: names of the model's parameters.
    """
    settings = experiment.settings(MODEL)
    if not isinstance(settings, PrivRecConfig) or not settings.features:
        return
    if not any(name.startswith("user.") for name in parameters):
        log.warning(
            "model %r represents users by features, and these data have none: the shared model"
            " ranks alike for all users. Add dataset.user-features, or use a model without"
            " features, such as item-weights (fedrec run --data TABLE.csv) or mf",
            experiment.model.name,
        )
