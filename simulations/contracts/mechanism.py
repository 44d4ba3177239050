# SPDX-License-Identifier: Apache-2.0
"""The contract of a privacy mechanism."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import toeplitz

from fedrec.components.registry import MECHANISM
from fedrec.privacy.accounting.accountant import Accountant, releases_of
from fedrec.privacy.accounting.sampling import Full, Scheduled
from fedrec.privacy.ledger import Ledger
from fedrec.privacy.mechanisms.base import Mechanism, longest_noise
from fedrec.rng import NoiseSource, Reproducible, Secure
from simulations.contracts.base import RunContract, assert_that, same_bits

ROUNDS = 8
SIZE = 40_000


class MechanismContract(RunContract):
    """Subclass it and set `component` to a `Mechanism`.

    Attributes:
        schedule: what the sampler guarantees, for a mechanism that needs a schedule; None: all
            clients take part in every round.
    """

    kind = MECHANISM
    schedule: Scheduled | None = None

    def placed(self) -> dict[str, Any]:
        """The `[privacy]` table."""
        table = {"clip-norm": 1.0, "noise-multiplier": 1.0, "mechanism": self.section()}
        return {"privacy": table}

    def mechanism(self) -> Mechanism:
        """The mechanism."""
        return self.cls(self.config(), self.section()["name"])

    def test_noise_is_a_function_of_its_source_and_its_memory(self) -> None:
        """Rounds that begin from a saved memory have the same bits; secure noise never repeats."""
        whole = self._drawn(Reproducible(0))
        memory: dict[str, np.ndarray] = {}
        first = self._drawn(Reproducible(0), range(1, 4), memory)
        saved = {name: value.copy() for name, value in memory.items()}
        second = self._drawn(Reproducible(0), range(4, ROUNDS + 1), saved)
        resumed = {str(index): row for index, row in enumerate([*first, *second])}
        expected = {str(index): row for index, row in enumerate(whole)}
        assert_that(
            same_bits(resumed, expected), "a resumed run has other noise: what is not saved?"
        )
        assert_that(
            not np.array_equal(self._drawn(Secure()), self._drawn(Secure())),
            "noise from the operating system repeats",
        )

    def test_noise_has_the_stated_standard_deviation(self) -> None:
        """No round has more, and one has as much."""
        stds = self._drawn(Reproducible(0)).std(axis=1)
        stated = self.mechanism().std
        assert_that(bool((stds <= stated * 1.05).all()), f"std {stds.max():.4g} above {stated:.4g}")
        correlated = self.mechanism().correlated
        assert_that(
            correlated or stds.max() >= stated * 0.95, f"std {stds.max():.4g}, not {stated}"
        )

    def test_the_charge_covers_what_all_rounds_reveal(self) -> None:
        """The best linear test for a client that moves each sum of its rounds by the sensitivity
        is within the charged (epsilon, delta), on independent coordinates."""
        mechanism = self.mechanism()
        sampling = Full() if self.schedule is None else self.schedule
        separation = 1 if self.schedule is None else self.schedule.separation
        scale = 3.0
        cost = mechanism.releases(scale, ROUNDS, sampling, "add-remove")
        backend = Accountant("pld").backend
        noise = scale * self._drawn(Reproducible(0))
        moved = np.zeros(ROUNDS)
        moved[::separation] = 1.0
        test = np.linalg.solve(np.cov(noise), moved)
        without = test @ noise
        with_client = without + test @ moved
        for cut in np.quantile(with_client, (0.2, 0.5, 0.8)):
            for epsilon in (0.0, 0.5, 1.0):
                caught = np.mean(with_client >= cut) - np.exp(epsilon) * np.mean(without >= cut)
                least = float(caught) - 5 * (1 + np.exp(epsilon)) / np.sqrt(SIZE)
                if least > 0:
                    charged = backend.epsilon(cost, least).epsilon
                    assert_that(
                        charged >= epsilon,
                        f"epsilon {charged:.4g} is charged at delta {least:.3g}; a test of all"
                        f" rounds reaches more than {epsilon:g}",
                    )

    def test_noise_is_correlated_as_stated(self) -> None:
        """What `mixing` states, undone, leaves independent noise of standard deviation 1; audits
        rely on it."""
        mechanism = self.mechanism()
        if not mechanism.correlated:
            return
        undo = np.linalg.inv(toeplitz(mechanism.mixing(ROUNDS), np.zeros(ROUNDS)))
        off = np.abs(np.cov(undo @ self._drawn(Reproducible(0))) - np.eye(ROUNDS)).max()
        assert_that(
            bool(off <= 6 * 2**0.5 / SIZE**0.5), f"`mixing` is not that of the noise: {off:.3g} off"
        )

    def test_noise_on_clients_has_no_memory_and_a_bound(self) -> None:
        """Where clients may add it: one upload has nothing of others, and is not too long."""
        mechanism = self.mechanism()
        if "local" not in mechanism.placements:
            return
        memory: dict[str, np.ndarray] = {}
        drawn = mechanism.draw("x", 1000, memory, Reproducible(0), 1, 5)
        assert_that(not memory, "noise on clients keeps a memory, which clients do not have")
        length = float(np.linalg.norm(drawn, mechanism.order))
        bound = longest_noise(mechanism.order, 1.0, 1, 1000)
        assert_that(length <= bound, f"norm {length:.4g} above the bound {bound:.4g}")

    def test_a_private_run_is_charged_for_all_its_rounds(self, tmp_path: Any) -> None:
        """The ledger has a line for each round, and together what the mechanism states."""
        result = self.run(tmp_path / "run", "rounds=4")
        ledger = Ledger(result.folder / "privacy.jsonl")
        assert_that([c.round_number for c in ledger.charges] == [1, 2, 3, 4], "rounds not charged")
        releases = releases_of({line.event: 1 for line in ledger.charges})
        assert_that(bool(releases), "the rounds cost nothing")

    def _drawn(
        self,
        source: NoiseSource,
        rounds: range = range(1, ROUNDS + 1),
        memory: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Noise of scale 1, `float64 [rounds, SIZE]`."""
        memory = {} if memory is None else memory
        mechanism = self.mechanism()
        return np.array([mechanism.draw("x", SIZE, memory, source, number) for number in rounds])
