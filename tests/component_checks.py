# SPDX-License-Identifier: Apache-2.0
"""What holds for fedrec's own samplers, mechanisms, perturbations, compressions and poisoning
attacks, beside the contract that all of these share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import toeplitz

from clients.node import Node
from clients.round import train_clients
from fedrec.compression.codec import Compression, Payload
from fedrec.data.perturbation import Perturbed
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.sampling import Full, Scheduled
from fedrec.privacy.clipping import Protection
from fedrec.privacy.mechanisms import Banded, Mechanism, cost_of, has_memory, inverse, longest_noise
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import Change, SparseUpdate, dense_change, network_bytes
from fedrec.rng import NoiseSource, Reproducible, Secure, stream
from server.samplers import Sampler
from simulations.contracts.base import (
    CompressionContract,
    MechanismContract,
    PerturbationContract,
    PoisoningContract,
    SamplerContract,
    same_bits,
    unchanged,
)
from simulations.poisoning import Poisoning

CLIENTS = 2 * np.arange(40) + 7
SAMPLED = 60
ROUNDS = 8
SIZE = 40_000
_CLIP_NORM = 1e-3
_MALICIOUS_CLIP_NORM = 0.01
_MALICIOUS = 4
_ROUND = 2


class SamplerChecks(SamplerContract):
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
        for number in range(1, SAMPLED + 1):
            cohort = sampler.sample(number)
            assert isinstance(cohort, np.ndarray) and cohort.dtype == np.int64 and cohort.ndim == 1
            assert (np.diff(cohort) > 0).all() and np.isin(cohort, CLIENTS).all()
            drawn.append(cohort)
        assert np.array_equal(np.unique(np.concatenate(drawn)), CLIENTS)

    def test_a_cohort_above_the_number_of_clients_is_refused(self) -> None:
        """The error for a cohort that is too large names the number of clients."""
        if "cohort" not in self.cls.Config.model_fields:
            return
        with pytest.raises(ExperimentError, match="40"):
            self.cls(self.config(cohort=41), CLIENTS.copy(), 0)

    def test_its_schedule_is_kept(self) -> None:
        """No cohort is larger than the schedule states, and no client takes part more often."""
        schedule = self.sampler().schedule
        if schedule is None:
            return
        sampler = self.sampler()
        taking_part = np.array(
            [np.isin(CLIENTS, sampler.sample(number)) for number in range(1, SAMPLED + 1)]
        )
        assert taking_part.sum(axis=1).max() <= schedule.cohort
        for row in taking_part.T:
            rounds = np.flatnonzero(row)
            assert (np.diff(rounds) >= schedule.separation).all()
            assert len(rounds) <= schedule.most(SAMPLED)

    def test_privacy_knows_it_or_refuses_it(self) -> None:
        """Accounting knows it by its name and computes amplification; a sampler that the plan does
        not know is refused."""
        section = self.section()
        config = PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)
        try:
            plan = Plan.of(config, section["name"], {**self.config().table()}, len(CLIENTS), 10)
        except ExperimentError as error:
            assert error.fix
            return
        sizes = [len(self.sampler().sample(number)) for number in range(1, SAMPLED + 1)]
        spread = 5 * np.sqrt(plan.denominator / SAMPLED)
        assert abs(np.mean(sizes) - plan.denominator) <= spread


class MechanismChecks(MechanismContract):
    """`schedule`: what the sampler guarantees, for a mechanism that needs a schedule; None: all
    clients take part in every round."""

    schedule: Scheduled | None = None

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
        parts = {str(number): row for number, row in enumerate([*first, *second])}
        expected = {str(number): row for number, row in enumerate(whole)}
        assert same_bits(parts, expected)
        assert bool(memory) == has_memory(self.mechanism())
        assert not np.array_equal(self._drawn(Secure()), self._drawn(Secure()))

    def test_noise_has_the_stated_standard_deviation(self) -> None:
        """No round has more, and one has as much."""
        stds = self._drawn(Reproducible(0)).std(axis=1)
        stated = self.mechanism().std
        assert (stds <= stated * 1.05).all()
        assert has_memory(self.mechanism()) or stds.max() >= stated * 0.95

    def test_the_charge_covers_what_all_rounds_reveal(self) -> None:
        """The best linear test for a client that moves each sum of its rounds by the sensitivity
        is within the charged (epsilon, delta), on independent coordinates."""
        mechanism = self.mechanism()
        sampling = Full() if self.schedule is None else self.schedule
        separation = 1 if self.schedule is None else self.schedule.separation
        scale = 3.0
        cost = cost_of(mechanism, scale, ROUNDS, sampling, "add-remove")
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
                    charged = backend.epsilon(cost, least)
                    assert charged >= epsilon

    def test_noise_is_correlated_as_stated(self) -> None:
        """What C^-1 has mixed, undone, leaves independent noise of standard deviation 1; audits
        rely on it."""
        mechanism = self.mechanism()
        if not isinstance(mechanism, Banded):
            return
        undo = np.linalg.inv(toeplitz(inverse(mechanism.column, ROUNDS), np.zeros(ROUNDS)))
        off = np.abs(np.cov(undo @ self._drawn(Reproducible(0))) - np.eye(ROUNDS)).max()
        assert off <= 6 * 2**0.5 / SIZE**0.5

    def test_noise_on_clients_has_no_memory_and_a_bound(self) -> None:
        """Where clients may add it: one upload has nothing of others, and is not too long."""
        mechanism = self.mechanism()
        if "local" not in mechanism.placements:
            return
        memory: dict[str, np.ndarray] = {}
        drawn = mechanism.draw("x", 1000, memory, Reproducible(0), 1, 5)
        assert not memory
        length = float(np.linalg.norm(drawn, mechanism.order))
        bound = longest_noise(mechanism.order, 1.0, 1, 1000)
        assert length <= bound

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


class PerturbationChecks(PerturbationContract):
    def test_perturbed_rows_can_be_trained_on(self) -> None:
        """Rows of the same users and items, each with an origin among the training rows or none."""
        data = self._data()
        found = self._perturbed(0)
        assert len(found.rows) > 0
        assert found.rows.num_users == data.rows.num_users
        assert found.rows.num_items == data.rows.num_items
        origin = np.asarray(found.origin)
        assert len(origin) == len(found.rows)
        assert origin.min() >= -1 and origin.max() < len(data.rows)

    def test_clients_train_on_it_and_are_tested_on_real_rows(self) -> None:
        """In an experiment, clients train on its result, and the held-out rows are the real
        ones."""
        population = Population.of(self.small())
        plain = Population.of(self.small().model_copy(update={"perturb": None}))
        clients = population.partition.training_clients
        counts = [len(data.items) for data in population.clients(clients)]
        users = self._perturbed(0).rows.users
        learned = np.bincount(users, minlength=population.interactions.num_users)
        assert counts == learned[clients].tolist()
        tested = plain.evaluated_clients("test")
        lists = [one.held_out(tested, "test").relevant for one in (population, plain)]
        assert np.array_equal(lists[0], lists[1])

    def _perturbed(self, seed: int) -> Perturbed:
        return self.cls(self.config(), seed).perturb(self._data())


class CompressionChecks(CompressionContract):
    def test_what_is_decoded_has_the_shape_of_the_update(self) -> None:
        """Of arrays, vectors, numbers and rows of tables; zero stays zero."""
        for name, change in _changes().items():
            decoded = self._decoded(self._encoded(change), change.shape)
            whole = dense_change(decoded)
            assert whole.shape == change.shape and np.isfinite(whole).all(), name
            nothing = self._decoded(self._encoded(_zero(change)), change.shape)
            assert not dense_change(nothing).any(), name

    def test_rows_that_did_not_change_stay(self) -> None:
        """Of a table, only rows of the update change."""
        change = _changes()["rows"]
        whole = dense_change(self._decoded(self._encoded(change), change.shape))
        assert not np.delete(whole, change.rows, axis=0).any()

    def test_it_sends_less_than_the_update(self) -> None:
        """No more bytes than rows and numbers as they are."""
        change = _changes()["rows"]
        plain = change.rows.nbytes + change.values.astype(np.float32).nbytes
        assert 0 < network_bytes(self._encoded(change)) <= plain

    def test_a_run_counts_what_is_sent(self, tmp_path: Path) -> None:
        """Each round states its bytes, less than whole parameters, and so does the result."""
        result = self.plain(tmp_path)
        whole = sum(value.nbytes for value in result.parameters.values())
        sent = result.rounds["bytes-up"] / result.rounds["num-clients"]
        assert ((sent > 0) & (sent < whole)).all()

    def test_the_clip_bounds_what_is_decoded(self, tmp_path: Path) -> None:
        """Without noise, a round of n clients moves the mean by no more than the clip norm."""
        private = f"privacy={{clip-norm={_CLIP_NORM}, noise-multiplier=0.0, delta=1e-5}}"
        rate = "strategy={name='reptile', server-lr=1.0}"
        runs = [
            self.run(tmp_path / str(rounds), private, rate, f"rounds={rounds}").parameters
            for rounds in (1, 2)
        ]
        apart = [runs[1][name] - runs[0][name] for name in runs[0]]
        norm = float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in apart)))
        assert norm <= _CLIP_NORM * 1.01

    def _made(self) -> Compression:
        return self.cls(self.config())

    def _encoded(self, change: Change) -> Payload:
        return self._made().encode(change, stream(0, "own"))

    def _decoded(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        return self._made().decode(payload, shape)


def _changes() -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows = np.array([1, 4, 5, 17, 36, 299])
    return {
        "array": random.normal(size=(12, 8)).astype(np.float32),
        "vector": random.normal(size=9).astype(np.float32),
        "number": np.float32(0.5) * np.ones((), dtype=np.float32),
        "rows": SparseUpdate((300, 16), rows, random.normal(size=(6, 16)).astype(np.float32)),
        "no rows": SparseUpdate((300, 16), rows[:0], np.zeros((0, 16), dtype=np.float32)),
        "numbers": SparseUpdate((300,), rows, random.normal(size=6).astype(np.float32)),
    }


def _zero(change: Change) -> Change:
    if isinstance(change, SparseUpdate):
        return SparseUpdate(change.shape, change.rows, np.zeros_like(change.values))
    return np.zeros_like(change)


class PoisoningChecks(PoisoningContract):
    def test_profiles_are_items_of_the_catalogue(self) -> None:
        """Distinct items of the catalogue."""
        known = self._known()
        for client in known.malicious.tolist():
            items = np.asarray(self._attack().profile(known, stream(0, "contract", client)))
            assert len(np.intersect1d(items, np.arange(known.items))) == len(items)

    def test_honest_users_keep_their_data(self) -> None:
        """Malicious users are added: all others have the same rows, in the same parts."""
        plain = Population.of(self.small(adversary=None))
        found = self._population()
        honest = plain.training_clients
        assert len(found.training_clients) == len(honest) + _MALICIOUS
        for client in honest.tolist():
            assert np.array_equal(found.client(client).items, plain.client(client).items)
        tested = plain.evaluated_clients("test")
        assert np.array_equal(tested, found.evaluated_clients("test"))

    def test_updates_are_a_function_of_the_round(self, tmp_path: Path) -> None:
        """The same sum twice; malicious clients count like others, and nothing that they receive is
        changed."""
        first, again = (self._sum(tmp_path / name, None) for name in ("first", "again"))
        assert same_bits(first[0], again[0])
        assert first[1] == _MALICIOUS

    def test_the_clip_bounds_them(self, tmp_path: Path) -> None:
        """Under protection, the sum of n malicious clients has at most n times the clip norm."""
        names = tuple(self._node(tmp_path / "names").initial())
        total, _ = self._sum(tmp_path / "sum", Protection(_MALICIOUS_CLIP_NORM, 2, names))
        norm = float(np.sqrt(sum(np.square(value).sum() for value in total.values())))
        bound = _MALICIOUS_CLIP_NORM * _MALICIOUS
        assert norm <= bound * (1 + 1e-6)

    def _attack(self) -> Poisoning:
        return self.cls(self.config())

    def _population(self) -> Population:
        return Population.of(self.small())

    def _node(self, folder: Path) -> Node:
        return Node(self.small(), 0, 1, folder)

    def _sum(
        self, folder: Path, protection: Protection | None
    ) -> tuple[dict[str, np.ndarray], int]:
        """The sum of malicious clients alone, in round 2, and their number."""
        node = self._node(folder)
        random = np.random.default_rng(3)
        arrays = {
            name: value.numpy() + random.normal(0, 0.1, value.shape).astype(np.float32)
            for name, value in node.initial().items()
        }
        order = TrainOrder(_ROUND, self._known().malicious, protection=protection)
        with unchanged(arrays):
            found = train_clients(node, arrays, order)
        total = {name: dense_change(value) for name, value in found.total.items()}
        return total, found.clients


CHECKS = {
    "sampler": SamplerChecks,
    "mechanism": MechanismChecks,
    "perturbation": PerturbationChecks,
    "compression": CompressionChecks,
    "poisoning": PoisoningChecks,
}
"""Checks of a kind, in place of its contract."""
