# SPDX-License-Identifier: Apache-2.0
"""The contracts of attacks: poisoning attacks, and attacks on runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from clients.node import Node
from clients.round import train_clients
from fedrec.components.registry import ATTACK, POISONING
from fedrec.data.malicious_users import Known
from fedrec.data.population import Population
from fedrec.errors import ComponentError
from fedrec.experiment.schema import TARGET_METRICS
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream
from simulations.attacks.base import Attack, AttackOutcome, run_attack
from simulations.contracts.base import (
    Contract,
    RunContract,
    assert_close,
    assert_equal,
    assert_that,
    fail,
    same_bits,
    unchanged,
)
from simulations.poisoning.base import Poisoning

_CLIP_NORM = 0.01
_CLIENTS = 4
_ROUND = 2


class PoisoningContract(RunContract):
    """Subclass it and set `component` to a `Poisoning`."""

    kind = POISONING

    def placed(self) -> dict[str, Any]:
        """The adversary, with the component as its attack."""
        return {"adversary": {"attack": self.section(), "clients": _CLIENTS, "targets": 2}}

    def test_profiles_are_items_of_the_catalogue(self) -> None:
        """Distinct items, a function of what is known and of the client's stream."""
        known = self._known()
        for client in known.malicious.tolist():
            items = np.asarray(self._attack().profile(known, stream(0, "contract", client)))
            assert_equal(len(np.unique(items)), len(items), "distinct items")
            inside = not len(items) or (items.min() >= 0 and items.max() < known.items)
            assert_that(bool(inside), f"items outside of [0, {known.items})")
        made = [self._attack().profile(known, stream(0, "contract", 1)) for _ in range(2)]
        assert_that(np.array_equal(made[0], made[1]), "one stream gives two profiles")

    def test_honest_users_keep_their_data(self) -> None:
        """Malicious users are added: all others have the same rows, in the same parts."""
        plain = Population.of(self.small(adversary=None))
        found = self._population()
        honest = plain.training_clients
        assert_equal(len(found.training_clients), len(honest) + _CLIENTS, "training clients")
        for client in honest.tolist():
            same = np.array_equal(found.client(client).items, plain.client(client).items)
            assert_that(same, f"client {client} has other rows")
        tested = plain.evaluated_clients("test")
        again = found.evaluated_clients("test")
        assert_that(np.array_equal(tested, again), "other users are tested")

    def test_updates_are_a_function_of_the_round(self, tmp_path: Path) -> None:
        """The same sum twice; malicious clients count like others, and nothing that they receive is
        changed."""
        first, again = (self._sum(tmp_path / name, None) for name in ("first", "again"))
        assert_that(same_bits(first[0], again[0]), "one round gives two sums")
        assert_equal(first[1], _CLIENTS, "clients in the sum")

    def test_the_clip_bounds_them(self, tmp_path: Path) -> None:
        """Under protection, the sum of n malicious clients has at most n times the clip norm."""
        names = tuple(self._node(tmp_path / "names").initial())
        total, _ = self._sum(tmp_path / "sum", Protection(_CLIP_NORM, 2, names))
        norm = float(np.sqrt(sum(np.square(value).sum() for value in total.values())))
        bound = _CLIP_NORM * _CLIENTS
        assert_that(norm <= bound * (1 + 1e-6), f"a norm of {norm:.4g}, above {bound:.4g}")

    def test_training_paths_and_nodes_make_no_difference(self, tmp_path: Path) -> None:
        """The reference path and one node more end with the same parameters up to rounding."""
        whole = self.plain(tmp_path).parameters
        for name, override in (("nodes", "engine.nodes=3"), ("path", "engine.path=reference")):
            other = self.run(tmp_path / name, override).parameters
            assert_close(other, whole, f"with {override}")

    def test_its_targets_are_measured(self, tmp_path: Path) -> None:
        """Exposure, NDCG and rank of the targets are among the results."""
        found = self.plain(tmp_path).metrics
        columns = {column.partition("@")[0] for column in found}
        missing = set(TARGET_METRICS) - columns
        assert_that(not missing, f"no {', '.join(missing)} among the results")

    def _attack(self) -> Poisoning:
        return self.cls(self.config())

    def _population(self) -> Population:
        return Population.of(self.small())

    def _known(self) -> Known:
        known = self._population().adversary
        if known is None:
            fail("the experiment has no adversary")
        return known

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
        total = {name: dense_change(value, arrays[name]) for name, value in found.total.items()}
        return total, found.clients


class AttackContract(Contract):
    """Subclass it and set `component` to an `Attack`."""

    kind = ATTACK

    def placed(self) -> dict[str, Any]:
        """No section: attacks are not part of an experiment."""
        return {}

    def test_it_attacks_trained_systems(self, tmp_path: Path) -> None:
        """As `fedrec attack` does: the outcome is saved, and its table has as many cells in each
        row as titles. Suspicion is one finite number per user."""
        found = self._outcome(tmp_path)
        cls: type[Attack] = self.cls
        saved = json.loads((tmp_path / cls.file).read_text(encoding="utf-8"))
        assert_that(saved == json.loads(json.dumps(found.table)), "another outcome is saved")
        widths = {len(row) for row in found.rows}
        assert_that(len(found.rows) > 1 and len(widths) == 1, f"rows of {sorted(widths)} cells")
        words = [cell for row in found.rows for cell in row] + [*found.lines, *found.reasons]
        assert_that(all(isinstance(word, str) for word in words), "rows and lines are no texts")
        assert_that(found.verdict in ("", "PASS", "WARN", "FAIL"), f"verdict {found.verdict!r}")

    def test_its_outcome_is_a_function_of_what_it_sees_and_the_seed(self, tmp_path: Path) -> None:
        """Two objects find the same in the same runs, which are not trained again."""
        first = self._outcome(tmp_path)
        stamps = _stamps(tmp_path)
        again = self._outcome(tmp_path)
        assert_that(again.table == first.table, "two objects find something else")
        assert_that(_stamps(tmp_path) == stamps, "its runs are other ones the second time")

    def _outcome(self, folder: Path) -> AttackOutcome:
        try:
            return run_attack(self.small(), self.section(), folder)
        except ComponentError as error:
            fail(error.text())


def _stamps(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.glob("*/checkpoints/*")}
