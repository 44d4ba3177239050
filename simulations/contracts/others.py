# SPDX-License-Identifier: Apache-2.0
"""Contracts of samplers, callbacks, mechanisms, perturbations, compressions and poisoning
attacks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_equal

from fedrec.components.registry import (
    CALLBACK,
    COMPRESSION,
    MECHANISM,
    PERTURBATION,
    POISONING,
    SAMPLER,
)
from fedrec.data.perturbation import TrainingData
from fedrec.data.population import Population, read_interactions
from fedrec.data.splits.rules import partition_by
from fedrec.protocol.updates import SparseUpdate
from fedrec.rng import Reproducible, stream
from simulations.contracts.base import (
    RunContract,
    assert_seeded,
    columns_of,
    same_bits,
    unchanged,
)

CLIENTS = 2 * np.arange(40) + 7
SIZE = 1000


class OtherContract(RunContract):
    """Base of these contracts: a component is created from its settings, gives the same result for
    the same seed, alone and in a resumed run, and does not change its input."""

    @abstractmethod
    def applied(self, seed: int) -> dict[str, np.ndarray]:
        """Result of a new component with a seed, as named arrays."""

    def test_it_is_a_function_of_its_seed_and_changes_no_input(self) -> None:
        """Check for equal results with one seed, and, if `random`, different ones with another."""
        assert_seeded(self.applied, same_bits, self.random)


class SamplerContract(OtherContract):
    """Contract of a sampler: subclass it and set `component` to a `Sampler`."""

    kind = SAMPLER

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        clients = CLIENTS.copy()
        sampler = self.cls(self.config(), clients, seed)
        with unchanged({"clients": clients}):
            return {str(number): sampler.sample(number) for number in range(1, 9)}


class CallbackContract(OtherContract):
    """Contract of a callback: subclass it and set `component` to a `Callback`."""

    kind = CALLBACK
    random = False

    def placed(self) -> dict[str, Any]:
        """Section with the list of callbacks."""
        return {"callbacks": [self.section()]}

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        row = {"round": 1, "loss": 0.5, "hits@5": 0.25}
        before = dict(row)
        stops = self.cls(self.config()).after_round(row, 0.1)
        assert_equal(row, before, "the row of a round")
        return {"stops": np.array(bool(stops))}


class MechanismContract(OtherContract):
    """Contract of a mechanism: subclass it and set `component` to a `Mechanism`."""

    kind = MECHANISM

    def placed(self) -> dict[str, Any]:
        """Section `[privacy]` with the mechanism."""
        table = {"clip-norm": 1.0, "noise-multiplier": 1.0, "mechanism": self.section()}
        return {"privacy": table}

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        mechanism = self.cls(self.config(), self.section()["name"])
        memory: dict[str, np.ndarray] = {}
        return {
            str(number): mechanism.draw("x", SIZE, memory, Reproducible(seed), number)
            for number in range(1, 5)
        }


class PerturbationContract(OtherContract):
    """Contract of a perturbation: subclass it and set `component` to a `Perturbation`."""

    kind = PERTURBATION

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        experiment = self.small()
        interactions = read_interactions(experiment)
        split = partition_by(experiment.split, 0, interactions)
        rated = experiment.task == "rating" or experiment.positive_above is not None
        rows = interactions.with_rows(split.train_rows)
        with unchanged(columns_of(rows)):
            data = TrainingData(rows, split.training_clients, rated)
            return columns_of(self.cls(self.config(), seed).perturb(data).rows)


class CompressionContract(OtherContract):
    """Contract of a compression: subclass it and set `component` to a `Compression`."""

    kind = COMPRESSION
    random = False

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        table = random.normal(size=(6, 16)).astype(np.float32)
        rows = np.array([1, 4, 5, 17, 36, 299])
        change_of_rows = SparseUpdate((300, 16), rows, table)
        codec = self.cls(self.config())
        sent: dict[str, np.ndarray] = {}
        with unchanged({"values": table, "rows": rows}):
            for name, change in (("all", table), ("rows", change_of_rows)):
                payload = codec.encode(change, stream(seed, "client"))
                sent |= {f"{name}/{key}": value for key, value in payload.items()}
        return sent


class PoisoningContract(OtherContract):
    """Contract of a poisoning attack: subclass it and set `component` to a `Poisoning`."""

    kind = POISONING
    random = False

    def placed(self) -> dict[str, Any]:
        """Section of the adversary, with the component as its attack."""
        return {"adversary": {"attack": self.section(), "share": 0.23, "targets": 2}}

    def applied(self, seed: int) -> dict[str, np.ndarray]:
        known = Population.of(self.small()).adversary
        if known is None:
            pytest.fail("the experiment has no adversary")
        attack = self.cls(self.config())
        with unchanged({"malicious": known.malicious}):
            return {
                str(client): np.asarray(attack.profile(known, stream(seed, "contract", client)))
                for client in known.malicious.tolist()
            }
