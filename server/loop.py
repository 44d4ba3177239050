# SPDX-License-Identifier: Apache-2.0
"""The rounds of a run, over Flower's `Strategy` and `Grid` interfaces.

The loop knows a grid and nothing of what is behind it, so it is the same for the serial, Ray and Flower engines and for
real nodes. Flower's own `Strategy.start` is not used: it cannot resume, loses everything when a round fails, and cannot
stop early.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrec import wire
from fedrec.blame import blaming, finite, named, refuse_other_arrays
from fedrec.data.perturbation import perturbation_of
from fedrec.errors import ClientError, ExperimentError, RunError
from fedrec.experiment import Experiment
from fedrec.live_arrays import live_arrays, to_record
from fedrec.memory import give_back_memory
from fedrec.registry import STRATEGY
from fedrec.rng import seed_sequence
from fedrec.runs import Result, RunFolder
from server.audience import Audience
from server.callbacks.base import Callback
from server.central import baseline_privacy, refuse_central
from server.checkpoint import Checkpoints, State
from server.cohorts import SampledCohorts
from server.deployed import DeployedGrid
from server.discovery import MOST_CLIENTS, Discovery
from server.estimate import estimate
from server.evaluation import Evaluator, grouped, has_fine_tuning, means, metric_columns
from server.gate import Gate
from server.initial import most_common_parameters
from server.personal import accounts_of
from server.privacy import guard_of
from server.replies import answers
from server.roster import call_roster
from server.secure_sums import refuse_non_additive, secure_sums
from server.strategy_state import make_strategy, restore_strategy, strategy_state
from server.training_paths import announce_paths
from strategies.base import GeneratingStrategy

log = logging.getLogger("fedrec")
_PRIVACY = "privacy:"  # marks what the guard remembers among what the strategy does
_LARGE = 2**22  # numbers in a table
_STALE = 1.0  # seconds; rounds may be shorter than it takes to write the table of all of them


class Loop:
    """Runs an experiment on a grid, from the newest checkpoint of its run folder to the end.

    Args:
        run: the run folder; it holds the experiment.
        grid: reaches the nodes.
        callbacks: told what happens.
    """

    def __init__(self, run: RunFolder, grid: Grid, callbacks: Sequence[Callback] | Audience = ()) -> None:
        self.run, self.grid = run, grid
        self.callbacks = callbacks if isinstance(callbacks, Audience) else Audience(callbacks)
        self.experiment = run.experiment
        refuse_central(self.experiment)
        self.checkpoints = Checkpoints(run.checkpoints, self.experiment.digest(), keep=self.experiment.checkpoint.keep)
        engine = self.experiment.engine
        self.discovery, self.gate = None, None
        if isinstance(grid, DeployedGrid):  # real nodes, that come and go, and may be anybody's
            _refuse_unregistered(self.experiment, grid)
            most = grid.most_clients or MOST_CLIENTS
            self.discovery = Discovery(grid, run.path / "roster.json", timeout=engine.timeout, most=most)
            self.gate = Gate()
            self.roster = self.discovery.wait_for(engine.nodes or 1)
        else:
            self.roster = call_roster(grid, timeout=engine.timeout)
        self.secure = secure_sums(self.experiment, grid, self.roster)
        self.cohorts = SampledCohorts(self.experiment, self.secure.whole if self.secure else self.roster, grid=grid)
        self.strategy = make_strategy(self.experiment, self.cohorts)
        if self.secure is not None:
            refuse_non_additive(self.strategy)
        self.guard = guard_of(run, self.strategy)
        self.personal = accounts_of(run, self.strategy, self.cohorts)
        _refuse_to_wait(self.strategy, len(self.roster.nodes))
        generating = self.strategy if isinstance(self.strategy, GeneratingStrategy) else None
        untrusted = self.gate is not None
        self.evaluator = Evaluator(self.experiment, self.roster, grid, generating, untrusted=untrusted)
        self._written = -math.inf

    def execute(self, baselines: dict[str, dict[str, float]]) -> Result:
        """Run the remaining rounds, evaluate, and write everything to the run folder.

        Args:
            baselines: metrics of the centralised baselines, to stand beside.

        Raises:
            ClientError: clients failed, or the parameters are no longer numbers.
            RunError: the run folder cannot be written.
        """
        state = self._held(self._start())
        give_back_memory()  # the parameters as they came
        announce_paths(self.roster, self._tell)
        self.callbacks.on_start(self.run, state.round + 1, self.experiment.rounds)
        self._forecast(state)
        state, stop = self._remaining(state)
        if stop or state.round < self.experiment.rounds:
            _refuse_non_finite(state.parameters, state.round, self.strategy)
            self.checkpoints.save(state)  # the last round, whatever checkpoint.every says
        return self._finish(state, baselines)

    def _remaining(self, state: State) -> tuple[State, bool]:
        """The rounds that are left; the state after them, and whether a callback wanted no more."""
        stop = False
        try:
            while state.round < self.experiment.rounds and not stop:
                if self._spent(state.round):
                    break
                before = self._watched(state)
                state = self._round(state)
                self.callbacks.on_update(state.round, before, state.parameters)
                self._save(state)
                seconds = state.timings[-1]["seconds"]
                log.info("round %d in %.2f s: %s", state.round, seconds, state.rounds[-1])
                stop = self.callbacks.after_round(state.rounds[-1], seconds)
            self.checkpoints.finish()
        except BaseException:
            with suppress(RunError):  # what broke the round off matters more
                self.checkpoints.finish()
                self._write(state)
            raise
        self._write(state)
        return state, stop

    def _spent(self, rounds: int) -> bool:
        """Whether no round can follow, for want of budget."""
        if self.guard is not None and not self.guard.pays(rounds + 1):
            self._tell(f"the privacy budget is spent after {rounds} rounds")
            return True
        if self.personal is not None and self.personal.spent(rounds + 1):
            self._tell(f"every user's budget is spent after {rounds} rounds")
            return True
        return False

    def _forecast(self, state: State) -> None:
        """Tell the callbacks what the run will take; not asked for where nobody listens."""
        left = self.experiment.rounds - state.round
        private = self.experiment.privacy
        if not left or not self.callbacks or (private is not None and private.placement != "central"):
            return  # a rehearsal's updates are bare, and there the server may not see such
        if isinstance(self.strategy, GeneratingStrategy):
            return  # a rehearsal sends the global parameters, which here never leave the server
        if self.personal is not None:
            return  # a rehearsal's uploads would be releases
        if self.secure is not None:
            return  # a rehearsal is of one node, whose sum the server may not see
        cohort = self.cohorts.sample(state.round + 1)
        found = estimate(self.experiment, self.roster, self.grid, state.parameters, cohort)
        if found is not None:
            log.info("expected: %s", found)
            self.callbacks.on_estimate(dataclasses.replace(found, seconds=found.round_seconds * left))

    def _watched(self, state: State) -> dict[str, np.ndarray]:
        """The parameters for callbacks that compare them with the next ones; a round may change them in place."""
        if not self.callbacks.compares:
            return state.parameters
        return {name: np.array(value) for name, value in state.parameters.items()}

    def _tell(self, text: str) -> None:
        log.info(text)
        self.callbacks.on_stage(text)

    def _start(self) -> State:
        state = self.checkpoints.latest()
        if state is None:
            if self.guard is not None and self.run.status()["round"]:
                self.guard.refuse_lost_charges(1)
            return State(0, self._initial_parameters())
        restore_strategy(self.strategy, {k: v for k, v in state.strategy.items() if not k.startswith(_PRIVACY)})
        if self.guard is not None:
            self.guard.restore(_own(state.strategy))
        log.info("continuing after round %d", state.round)
        return state

    def _initial_parameters(self) -> dict[str, np.ndarray]:
        """Asked of one node, because the server need not hold the catalogue; every node would give the same."""
        timeout = self.experiment.engine.timeout
        if self.gate is not None:
            return most_common_parameters(self.grid, self.roster, timeout=timeout)
        message = Message(RecordDict(), self.roster.nodes[0], wire.INITIAL)
        (reply,) = answers(self.grid.send_and_receive([message], timeout=timeout), sent=1, max_failures=0.0)
        return wire.unpack_parameters(reply.content)

    def _held(self, state: State) -> State:
        """The state with its parameters where the grid's nodes can see them, if it has such a place, and writable."""
        share = getattr(self.grid, "share", dict)
        held = {name: v if v.flags.writeable else v.copy() for name, v in share(state.parameters).items()}
        return dataclasses.replace(state, parameters=held)

    def _round(self, state: State) -> State:
        """One round: configure, send, aggregate, evaluate."""
        started = time.perf_counter()
        number = state.round + 1
        if self.discovery is not None and self.discovery.look():
            self.roster = self.evaluator.roster = self.discovery.roster
            if self.secure is not None:
                self.secure.roster = self.roster
            self.cohorts.joined(self.secure.whole if self.secure else self.roster)
        arrays = to_record(state.parameters)
        arrays, metrics = self._train(number, arrays)
        trained = time.perf_counter()
        parameters = live_arrays(arrays)
        if any(value.dtype != state.parameters[name].dtype for name, value in parameters.items()):
            # Some of Flower's strategies (FedAdam) turn float32 into float64.
            parameters = {name: value.astype(state.parameters[name].dtype) for name, value in parameters.items()}
            arrays = to_record(parameters)
        kept = self._due(number)  # the others' large tables are looked at when they are kept: it takes a while
        _refuse_non_finite({n: v for n, v in parameters.items() if kept or v.size < _LARGE}, number, self.strategy)
        row: dict[str, Any] = {"round": number, **metrics, **self._evaluate_sample(arrays, number)}
        ended = time.perf_counter()
        timing = {"round": number, "seconds": ended - started, "train": trained - started, "evaluate": ended - trained}
        memory = {name: np.copy(array) for name, array in strategy_state(self.strategy).items()}
        if self.guard is not None:
            row["epsilon"] = self.guard.epsilon()
            memory |= {f"{_PRIVACY}{name}": array for name, array in self.guard.state().items()}
        return State(number, parameters, memory, [*state.rounds, row], [*state.timings, timing])

    def _train(self, number: int, arrays: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        # Flower's own strategies draw nodes from Python's global generator: this makes them a function of the round
        # too.
        random.seed(int(seed_sequence(self.experiment.seed, "flower", number).generate_state(1)[0]))
        with blaming(STRATEGY.name, self.strategy, f"in round {number}, before training"):
            messages = list(self.strategy.configure_train(number, arrays, ConfigRecord(), self.grid))
        engine = self.experiment.engine
        theta = live_arrays(arrays)  # before the arrays leave, and become bytes
        if self.guard is not None:
            self.guard.before_upload(number)
        if self.personal is not None:
            self.personal.before_upload(number)
        replies = self._sent(messages)
        good = answers(replies, sent=len(messages), max_failures=engine.max_failures)
        if self.gate is not None:
            good = self.gate.trained(messages, good, theta)
        place = {node: place for place, node in enumerate(self.roster.nodes)}
        good.sort(key=lambda reply: place.get(reply.metadata.src_node_id, len(place)))
        self.checkpoints.finish()  # a strategy may use the parameters up that are being written
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        with blaming(STRATEGY.name, self.strategy, f"in round {number}, after training"):
            updated, metrics = self.strategy.aggregate_train(number, good)
            found = arrays if updated is None else updated
            refuse_other_arrays(STRATEGY.name, self.strategy, f"in round {number}", found, shapes)
            return found, dict(metrics or {})

    def _sent(self, messages: list[Message]) -> Iterable[Message]:
        """The replies to a round's training messages; under secure aggregation, to the one for all nodes together."""
        if not messages:
            return []
        if self.secure is not None:
            return self.secure.send_and_receive(messages)
        return self.grid.send_and_receive(messages, timeout=self.experiment.engine.timeout)

    def _evaluate_sample(self, arrays: ArrayRecord, number: int) -> dict[str, float]:
        every = self.experiment.evaluation.every
        if not every or (number % every and number != self.experiment.rounds):
            return {}
        table = self.evaluator.evaluate(
            arrays, number, self.evaluator.sampled_clients(self.experiment.evaluation.users)
        )
        return means(table)

    def _save(self, state: State) -> None:
        """Keep a round: a checkpoint if one is due, and tables and status if they are a while old."""
        due = self._due(state.round)
        if due and self._costly:
            self.checkpoints.save(state)
        elif due:
            self.checkpoints.begin(state)
        if due or time.monotonic() - self._written > _STALE:
            self._write(state)

    @property
    def _costly(self) -> bool:
        """Whether a lost round costs more than time: it would be charged again, or done again by others' devices."""
        return any(part is not None for part in (self.gate, self.guard, self.personal))

    def _due(self, number: int) -> bool:
        """Whether a checkpoint is written after a round."""
        return number % self.experiment.checkpoint.every == 0 or number == self.experiment.rounds

    def _write(self, state: State) -> None:
        self.run.write_rounds(state.rounds, state.timings)
        self.run.set_status("running", state.round)
        self._written = time.monotonic()

    def _finish(self, state: State, baselines: dict[str, dict[str, float]]) -> Result:
        arrays = to_record(state.parameters)
        started = time.perf_counter()
        before = self._evaluate_all(arrays, state.round, fine_tune=False)
        shared = time.perf_counter() - started
        tuned = has_fine_tuning(self.experiment)
        table = self._evaluate_all(arrays, state.round, fine_tune=True) if tuned else before
        perturbation = perturbation_of(self.experiment)
        perturbed = [] if perturbation is None else perturbation.words()
        spent, accounts = ([], {}) if self.personal is None else self.personal.close(state.round)
        of_baselines = baseline_privacy(self.run)
        result = Result(
            experiment=self.experiment,
            folder=self.run.path,
            metrics=means(table),
            before_fine_tuning=means(before) if tuned else {},
            baselines=baselines,
            rounds=pd.DataFrame(state.rounds),
            users=metric_columns(table),
            groups=grouped(table),
            parameters=state.parameters,
            privacy=(*perturbed, *spent, *([] if self.guard is None else self.guard.lines()), *of_baselines),
            baseline_users=self.run.baseline_users(),
        )
        seconds = {
            "training": sum(timing["seconds"] for timing in state.timings),
            "evaluation-without-fine-tuning": shared,
            "evaluation": time.perf_counter() - started,
        }
        extra: dict[str, Any] = {"seconds": seconds}
        if of_baselines:
            extra["baselines-privacy"] = {"in words": list(of_baselines)}
        if perturbed:
            extra["perturb"] = {"in words": perturbed}
        if self.personal is not None:
            extra["personal"] = accounts
        if self.guard is not None:
            extra["privacy"] = self.guard.table()
        self.run.write_result(result, extra)
        log.info("finished: %s", result.metrics)
        self.run.set_status("finished", state.round)
        self.callbacks.on_end(result)
        return result

    def _evaluate_all(self, arrays: ArrayRecord, number: int, *, fine_tune: bool) -> pd.DataFrame:
        self.callbacks.on_stage("evaluating " + ("with fine-tuning" if fine_tune else "the shared model"))
        clients = self.evaluator.sampled_clients(self.experiment.evaluation.final_users)
        progress = self.callbacks.on_evaluation
        return self.evaluator.evaluate(arrays, number, clients, fine_tune=fine_tune, progress=progress)


def _own(memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the guard remembered, out of a checkpoint's memory."""
    return {name.removeprefix(_PRIVACY): array for name, array in memory.items() if name.startswith(_PRIVACY)}


def _refuse_unregistered(experiment: Experiment, grid: DeployedGrid) -> None:
    """Refuse noise that a node could thin by claims: the more clients, the rarer is each thought to be drawn."""
    privacy = experiment.privacy
    if privacy is not None and privacy.placement != "local" and grid.most_clients is None:
        raise ExperimentError(
            "nobody knows how many clients a node of this deployment may claim, and noise is sized by their number",
            expected="most-clients in deployment.toml",
            got="none",
            fix="set it to the largest number of users that one node hosts, such as most-clients = 1",
        )


def _refuse_to_wait(strategy: Strategy, nodes: int) -> None:
    """Flower's strategies wait for their minimum of nodes without end, and nobody joins after the roster is made."""
    needed = max(getattr(strategy, "min_available_nodes", 0), getattr(strategy, "min_train_nodes", 0))
    if needed > nodes:
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} waits for more nodes than there are",
            expected=f"at least {needed} nodes",
            got=f"{nodes}",
            fix="set engine.nodes, or strategy.min-available-nodes and strategy.min-train-nodes",
        )


def _refuse_non_finite(parameters: dict[str, np.ndarray], number: int, strategy: Strategy) -> None:
    for name, array in parameters.items():
        if not finite(array):
            raise ClientError(
                f"training diverged in round {number}",
                expected="finite parameters",
                got=f"NaN or infinity in {name!r} from {named(STRATEGY.name, strategy)}",
                fix="lower step.learning-rate or strategy.server-lr, or mend that file; "
                "the checkpoint of the round before is intact",
            )
