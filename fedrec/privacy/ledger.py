# SPDX-License-Identifier: Apache-2.0
"""The privacy ledger of a run on disk: one JSON line per charge, written before a noisy release is
used.

A line is appended, flushed and synced to the disk, and only then may the round's parameters be
stored or sent. If a run is killed between the two, the round was charged without being completed;
when the run is resumed, the round is charged again. Charges are never refunded, because an
adversary may have seen the release. A last line that was cut off by a crash was never synced, so
nothing was released on it; it is dropped. Damage anywhere else is an error.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from fedrec.errors import FedrecError, RunError
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, Event, from_record, to_record
from fedrec.runtime.files import MOST_JSON, append_durably, parse_json


@dataclass(frozen=True)
class Charge:
    """One line of a ledger.

    Attributes:
        round_number: the round that was charged; the same number may occur more than once.
        event: what was released.
        count: how often.
    """

    round_number: int
    event: Event
    count: int = 1


class Ledger:
    """Charges of one run. Only one process may write, which the run folder's lock ensures.

    Args:
        path: the file, created by the first charge.
        backend: accountant, as in `Accountant`.
        budget: largest epsilon of all charges together, > 0; None: no limit.
        delta: at which the budget holds, in [0, 1).

    Raises:
        RunError: the file is damaged, other than by a last line that was cut off.
    """

    def __init__(
        self,
        path: Path,
        backend: str = DEFAULT_BACKEND,
        *,
        budget: float | None = None,
        delta: float = 0.0,
    ) -> None:
        self.path = path
        self.budget = budget
        self.delta = delta
        self.accountant = Accountant(backend)
        self.charges: list[Charge] = []
        self._size = 0
        for number, line in enumerate(_lines(path), 1):
            try:
                self._count(_charge(line))
            except (ValueError, KeyError, TypeError, FedrecError) as error:
                raise RunError(
                    f"line {number} of {path} is damaged",
                    expected="a charge in JSON, as this version of fedrec writes it",
                    got=f"{line[:80]!r} ({error})",
                    fix="restore the file from a backup; without it the privacy spent is unknown",
                ) from None
            self._size += len(line)

    def charge(self, round_number: int, event: Event) -> None:
        """Write a charge to disk; the release may be used only after this returns.

        Raises:
            RunError: the total would exceed the budget, or the charge could not be written, so
                nothing may be released.
        """
        if self.would_exceed(event):
            raise RunError(
                f"the charge of round {round_number} exceeds the privacy budget",
                expected=f"a total epsilon of at most {self.budget:g} at delta {self.delta:g}",
                got=f"1 more of {to_record(event)}",
                fix="nothing was released; raise privacy.budget or privacy.epsilon in a new run",
            )
        table = {"round": round_number, "count": 1, "event": to_record(event)}
        line = json.dumps(table, allow_nan=False)
        self._count(
            Charge(round_number, event)
        )  # rejects events that cannot be added, before anything is written
        written = line.encode() + b"\n"
        wanted = "a charge on disk before the release"
        append_durably(self.path, written, end=self._size, expected=wanted)
        self._size += len(written)

    def spent(self, delta: float) -> Report:
        """Total cost of all charges, see `Accountant.epsilon`."""
        return self.accountant.epsilon(delta)

    def would_exceed(self, event: Event) -> bool:
        """True if the total would exceed the budget after one more such event; False without a
        budget."""
        if self.budget is None:
            return False
        return self.accountant.would_exceed(event, self.budget, self.delta)

    def _count(self, charge: Charge) -> None:
        self.accountant.step(charge.event, charge.count)
        self.charges.append(charge)


def _lines(path: Path) -> list[bytes]:
    """Complete lines of a file, with line ends."""
    if not path.exists():
        return []
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(
            f"cannot read {path}",
            expected="a ledger",
            got=error.strerror or str(error),
            fix="make the file readable, or restore it from a backup",
        ) from None
    if rest:
        logging.getLogger("fedrec").warning(
            "%s: line %d was cut off by a crash and is dropped", path, len(lines) + 1
        )
    return [line + b"\n" for line in lines]


def _charge(line: bytes) -> Charge:
    record = parse_json(line, MOST_JSON)
    number = record["round"]
    count = record["count"]
    if type(number) is not int or type(count) is not int or not (number >= 0 and 0 < count < 2**63):
        raise ValueError(f"round {number!r}, count {count!r}")
    return Charge(number, from_record(record["event"]), count)
