# SPDX-License-Identifier: Apache-2.0
"""Stale answers: the parameters that they start from, their weight, and their number (FedBuff,
Nguyen et al. 2022)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedrec.protocol.zero_copy import to_record
from strategies.base import Part


class StartingParameters(dict[int, dict[str, np.ndarray]]):
    """Parameters that clients started from, by the number of rounds that made them.

    Args:
        exponent: an answer to parameters of s rounds ago has weight (1 + s)^-exponent.
    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def keep(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy parameters, which the next round may change in place."""
        self[version] = {name: np.array(value) for name, value in arrays.items()}

    def forget_others(self, needed: Collection[int]) -> None:
        """Keep these versions alone."""
        for version in self.keys() - set(needed):
            del self[version]

    def part(self, version: int, clients: np.ndarray, round_number: int) -> Part:
        """The part of a round whose clients `int64 [n]` started from a version.

        Args:
            version: number of rounds that made their parameters.
            clients: the clients.
            round_number: the round in which they answer.
        """
        weight = (round_number - version) ** -self._exponent
        return Part(clients, to_record(self[version]), weight)


def stale_columns(stale: Sequence[int], counts: Counter[str]) -> dict[str, Any]:
    """Columns of a round, which is added to the counts of the run.

    Args:
        stale: how many rounds old the parameters of each client's answer are.
        counts: of `answers`, of `late` ones, and of their `stale rounds` in all.
    """
    late = sum(one > 0 for one in stale)
    counts.update({"answers": len(stale), "late": late})
    counts["stale rounds"] += sum(stale)
    return {"late-clients": late, "staleness": sum(stale) / max(1, len(stale))}


def stale_words(counts: Counter[str]) -> str:
    """The counts of `stale_columns` in words."""
    mean = counts["stale rounds"] / max(1, counts["answers"])
    return (
        f"{counts['late']} of {counts['answers']} answers were to parameters of earlier rounds, on"
        f" average {mean:.3g} rounds old"
    )
