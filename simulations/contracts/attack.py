# SPDX-License-Identifier: Apache-2.0
"""The contract of an attack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedrec.components.registry import ATTACK
from fedrec.errors import ComponentError
from simulations.attacks.base import Attack, AttackOutcome
from simulations.attacks.driver import run_attack
from simulations.contracts.base import Contract, assert_that, fail


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
