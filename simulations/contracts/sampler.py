# SPDX-License-Identifier: Apache-2.0
"""The contracts of cohort samplers and of callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedrec.components.registry import CALLBACK, SAMPLER
from fedrec.errors import ExperimentError
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from fedrec.runs.result import Result
from server.callbacks.base import Callback
from server.samplers import Sampler
from simulations.contracts.base import Contract, RunContract, assert_that, refused, same_bits

CLIENTS = 2 * np.arange(40) + 7
ROUNDS = 60


class SamplerContract(RunContract):
    """Subclass it and set `component` to a `Sampler`."""

    kind = SAMPLER

    def sampler(self, seed: int = 0) -> Sampler:
        """The sampler over 40 clients that cannot be written to."""
        clients = CLIENTS.copy()
        clients.setflags(write=False)
        return self.cls(self.config(), clients, seed)

    def test_cohorts_are_distinct_clients_in_order(self) -> None:
        """`int64 [clients]`, ascending, distinct, a subset of the clients; every client can be
        drawn."""
        sampler = self.sampler()
        drawn = []
        for number in range(1, ROUNDS + 1):
            cohort = sampler.sample(number)
            right = isinstance(cohort, np.ndarray) and cohort.dtype == np.int64 and cohort.ndim == 1
            assert_that(right, f"round {number}: {cohort!r} is not an int64 vector")
            ordered = bool((np.diff(cohort) > 0).all())
            assert_that(ordered, f"round {number}: not ascending and distinct: {cohort}")
            known = bool(np.isin(cohort, CLIENTS).all())
            assert_that(known, f"round {number}: unknown clients: {cohort}")
            drawn.append(cohort)
        missing = np.setdiff1d(CLIENTS, np.concatenate(drawn))
        assert_that(not len(missing), f"in {ROUNDS} rounds these were never drawn: {missing}")

    def test_a_cohort_is_a_function_of_seed_and_round(self) -> None:
        """The same when sampled again, in another order or by another object; another seed gives
        other cohorts."""
        rounds = (1, 2, 3, 4)
        forward = {str(number): self.sampler().sample(number) for number in rounds}
        backward = self.sampler()
        again = {str(number): backward.sample(number) for number in rounds[::-1]}
        assert_that(same_bits(forward, again), "the order of asking makes a difference")
        other = self.sampler(seed=1)
        others = {str(number): other.sample(number) for number in rounds}
        differ = not same_bits(forward, others)
        assert_that(differ or not self.random, "the seed makes no difference")

    def test_a_cohort_above_the_number_of_clients_is_refused(self) -> None:
        """The error for a cohort that is too large names the number of clients."""
        if "cohort" not in self.cls.Config.model_fields:
            return
        with refused(ExperimentError, "40", "a cohort of 41 of 40 clients"):
            self.cls(self.config(cohort=41), CLIENTS.copy(), 0)

    def test_its_schedule_is_kept(self) -> None:
        """No cohort is larger than the schedule states, and no client takes part more often."""
        schedule = self.sampler().schedule
        if schedule is None:
            return
        sampler = self.sampler()
        taking_part = np.array(
            [np.isin(CLIENTS, sampler.sample(number)) for number in range(1, ROUNDS + 1)]
        )
        largest = taking_part.sum(axis=1).max()
        assert_that(largest <= schedule.cohort, f"a cohort of {largest}, not {schedule.cohort:g}")
        for client, row in zip(CLIENTS.tolist(), taking_part.T, strict=True):
            rounds = np.flatnonzero(row)
            near = np.diff(rounds).min(initial=schedule.separation)
            assert_that(
                near >= schedule.separation,
                f"client {client} after {near} rounds, not {schedule.separation}",
            )
            most = schedule.most(ROUNDS)
            assert_that(len(rounds) <= most, f"client {client} in {len(rounds)} rounds, not {most}")

    def test_privacy_knows_it_or_refuses_it(self) -> None:
        """Accounting knows it by its name and computes amplification; a sampler that the plan does
        not know is refused."""
        section = self.section()
        config = PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)
        try:
            plan = Plan.of(config, section["name"], {**self.config().table()}, len(CLIENTS), 10)
        except ExperimentError as error:
            assert_that(bool(error.expected and error.got), f"refused without the reason: {error}")
            return
        sizes = [len(self.sampler().sample(number)) for number in range(1, ROUNDS + 1)]
        spread = 5 * np.sqrt(plan.denominator / ROUNDS)
        close = abs(np.mean(sizes) - plan.denominator) <= spread
        words = f"cohorts of {np.mean(sizes):.1f} on average, and the plan says {plan.denominator}"
        assert_that(close, words)


class CallbackContract(Contract):
    """Subclass it and set `component` to a `Callback`."""

    kind = CALLBACK
    random = False

    def placed(self) -> dict[str, Any]:
        """The sections that put the component into an experiment."""
        return {"callbacks": [self.section()]}

    def test_the_results_of_the_run_are_unchanged(self, tmp_path: Path) -> None:
        """It may end a run early, and changes nothing else."""
        watched = self._run(tmp_path / "watched", rounds=3)
        unwatched = self._run(tmp_path / "unwatched", rounds=len(watched.rounds), callbacks=None)
        same = same_bits(watched.parameters, unwatched.parameters)
        assert_that(same, "the run ends with other parameters")
        assert_that(watched.metrics == unwatched.metrics, "the run ends with other metrics")

    def test_after_a_round_it_returns_whether_to_stop(self) -> None:
        """`after_round` gives a truth value, and changes no row but its own copy."""
        callback: Callback = self.cls(self.config())
        row = {"round": 1, "loss": 0.5, "hits@5": 0.25}
        found = callback.after_round(dict(row), 0.1)
        right = isinstance(found, bool | np.bool_)
        assert_that(right, f"after_round gives {found!r}, neither True nor False")

    def test_a_resumed_run_can_be_watched(self, tmp_path: Path) -> None:
        """It begins in the middle, with a fresh object."""
        from simulations import runner

        self._run(tmp_path / "run", rounds=2)
        result = runner.resume(tmp_path / "run")
        assert_that(len(result.rounds) > 0, "no rounds")

    def _run(self, folder: Path, *, rounds: int, **changes: Any) -> Result:
        from simulations import runner

        small = self.small(f"rounds={rounds}")
        return runner.run(small.model_copy(update=changes), output=folder)
