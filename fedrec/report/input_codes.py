# SPDX-License-Identifier: Apache-2.0
"""The inputs of a table's systems in short: a code for each row, a legend of the codes, and a
warning where rows differ, as such rows do not tell which system is better with equal inputs.

    U, U1, U2   side features of users; numbered where rows use different ones
    G, E, Ge    one side feature of items each, by its initial, or the shortest beginning that is
                not taken
    L           rated items that are not positive
    T           known rows of test users in training
    -           none of these: who liked which item, alone
    ?           not stated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedrec.report.inputs import Inputs

_NAMED = 2  # systems in a warning; of more the rest is counted
_RESERVED = ("U", "L", "T")
_NOTHING = "-"
_UNKNOWN = "?"


@dataclass(frozen=True)
class InputCodes:
    """The inputs of a table in short.

    Attributes:
        codes: by row.
        legend: what the codes mean, one line; empty where no row has any.
        warning: which rows have inputs that others have not, one line; empty where all are equal.
    """

    codes: dict[str, str]
    legend: str
    warning: str

    @property
    def lines(self) -> list[str]:
        """Legend and warning, where there are any."""
        return [line for line in (self.legend, self.warning) if line]


def input_codes(rows: Mapping[str, Inputs | None]) -> InputCodes:
    """The codes of a table's rows.

    Args:
        rows: inputs of each row; None: not stated.
    """
    having: dict[str, dict[str, None]] = {}  # the rows that have each input, by its words
    for row, inputs in rows.items():
        for words in _words(inputs):
            having.setdefault(words, {})[row] = None
    short = _short(list(having))
    codes = {
        row: _UNKNOWN if inputs is None else " ".join(short[one] for one in _words(inputs))
        for row, inputs in rows.items()
    }
    known = [row for row, inputs in rows.items() if inputs is not None]
    legend = "; ".join(f"{short[words]}: {words}" for words in having)
    weights = sorted({one for inputs in rows.values() if inputs for one in inputs.low_rated})
    if weights:
        legend = legend.replace(_LOW, f"{_LOW} (weight {', '.join(weights)})")
    return InputCodes(
        {row: code or _NOTHING for row, code in codes.items()},
        f"inputs: {legend}" if legend else "",
        _warning(having, known),
    )


def budgets(rows: Mapping[str, Inputs | None]) -> list[str]:
    """Client-rounds and numbers of settings tried of a table's rows, where they are known, one line
    at most."""
    found = []
    for what, key in (("client-rounds", "client_rounds"), ("settings tried", "settings_tried")):
        known = {
            row: value for row, inputs in rows.items() if (value := getattr(inputs, key, None))
        }
        if known:
            found.append(f"{what}: " + ", ".join(f"{row} {n:,}" for row, n in known.items()))
    return ["; ".join(found)] if found else []


_LOW = "rated items that are not liked"
_TEST = "known rows of test users in training"


def _words(inputs: Inputs | None) -> list[str]:
    """Each input in words."""
    if inputs is None:
        return []
    found = [f"users' {_listed(inputs.user_features)}"] if inputs.user_features else []
    found += [f"items' {name}" for name in inputs.item_features]
    found += [_LOW] if inputs.low_rated else []
    return found + ([_TEST] if inputs.test_users else [])


def _short(inputs: Sequence[str]) -> dict[str, str]:
    """The code of each input, given in words."""
    users = [words for words in inputs if words.startswith("users' ")]
    found = {words: f"U{n}" if len(users) > 1 else "U" for n, words in enumerate(users, 1)}
    found |= {_LOW: "L", _TEST: "T"}
    for words in inputs:
        if words not in found:
            name = words.removeprefix("items' ").capitalize()
            taken = {*_RESERVED, *found.values()}
            free = (name[:end] for end in range(1, len(name)) if name[:end] not in taken)
            found[words] = next(free, name)
    return found


def _warning(having: Mapping[str, Mapping[str, None]], rows: Sequence[str]) -> str:
    """Who has what, by the rows that have it, or by those that have not if these are fewer."""
    apart: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for words, own in having.items():
        others = [row for row in rows if row not in own]
        if others:
            some = len(own) <= len(others)
            apart.setdefault((tuple(own) if some else tuple(others), some), []).append(words)
    said = [
        f"{_listed(names)} {_verb(names, some)} {_listed(words, 'and' if some else 'nor')}"
        for (names, some), words in apart.items()
    ]
    return f"rows differ in their inputs: {'; '.join(said)}" if said else ""


def _verb(names: Sequence[str], some: bool) -> str:
    has = "has" if len(names) == 1 else "have"
    return f"alone {has}" if some else f"{has} no"


def _listed(names: Sequence[str], last: str = "and") -> str:
    """Names in a sentence; of many the first, and how many others there are."""
    names = [name.strip() for name in names]
    if last == "and" and len(names) > _NAMED + 1:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} others"]
    return f" {last} ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])
