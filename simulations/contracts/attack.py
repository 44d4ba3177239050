# SPDX-License-Identifier: Apache-2.0
"""The contract of a membership attack."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from clients.hosting.node import Node
from fedrec.attacks.base import Attack, Attacked
from fedrec.components.registry import ATTACK
from fedrec.experiment.sections import Section
from simulations.attacks.federations import scores_of
from simulations.attacks.named import attack_by_name
from simulations.contracts.base import Contract, assert_that


class AttackContract(Contract):
    """Subclass it and set `component` to an `Attack`."""

    kind = ATTACK

    def placed(self) -> dict[str, dict[str, object]]:
        """No section: attacks are not part of an experiment."""
        return {}

    def attacked(self) -> Attacked:
        """A system that has not learned anything, whose arrays cannot be written to."""
        experiment = self.small()
        node = Node(experiment, 0, 1, None)
        parameters = {name: value.numpy() for name, value in node.initial().items()}
        scores = partial(
            scores_of, experiment, {n: v.copy() for n, v in parameters.items()}, fine_tune=False
        )
        for value in parameters.values():
            value.setflags(write=False)
        return Attacked(node.training, node.population, parameters, scores)

    def test_suspicion_is_one_finite_number_per_user(self) -> None:
        """`[users]`, finite; the threshold is a number."""
        attacked = self.attacked()
        attack = self._attack()
        found = attack.suspicion(attacked)
        right = (
            isinstance(found, np.ndarray)
            and found.shape == attacked.users.shape
            and bool(np.isfinite(found).all())
        )
        assert_that(right, f"suspicion is {found!r}")
        assert_that(bool(np.isfinite(attack.threshold(found))), "the threshold is not finite")

    def test_suspicion_is_a_function_of_what_is_seen_and_the_seed(self) -> None:
        """Two objects give the same numbers."""
        attacked = self.attacked()
        first, again = (self._attack().suspicion(attacked) for _ in range(2))
        assert_that(np.array_equal(first, again), "two objects give different numbers")

    def test_it_attacks_a_trained_system(self, tmp_path: Path) -> None:
        """As `fedrec attack run` does."""
        section = self.section()
        found = attack_by_name(self.small(), Section.model_validate(section), tmp_path)
        assert_that(0 <= found.success.auc.value <= 1, f"{found.success}")
        assert_that(
            found.success.members + found.success.others == len(self.attacked().users),
            "somebody is missing",
        )

    def _attack(self) -> Attack:
        return self.cls(self.config(), 0)
