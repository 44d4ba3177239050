# SPDX-License-Identifier: Apache-2.0
"""Batches that a node drew to tell the server which items a client needs, kept until it trains that
client in the same round, so that they are drawn once."""

from __future__ import annotations

from clients.step import Step, StepConfig
from fedrec.cohort.batches import Batches

MOST_CLIENTS = 16_384
"""Largest number of clients whose batches, some 7 KB each, are in memory together."""


class DrawnBatches:
    """The batches of clients in one round. Those of a client are a function of the experiment, the
    step and the round: a client whose batches are not here has them drawn again."""

    def __init__(self) -> None:
        self._round = 0
        self._of: dict[int, tuple[type[Step], StepConfig, Batches]] = {}

    def keep(self, step: Step, round_: int, client: int, batches: Batches) -> None:
        """Keep the batches of a client; those of another round are forgotten."""
        if round_ != self._round:
            self._of.clear()
            self._round = round_
        if len(self._of) < MOST_CLIENTS:
            self._of[client] = (type(step), step.config, batches)

    def take(self, step: Step, round_: int, client: int) -> Batches | None:
        """The batches of a client, once: training may use up the random stream in them. None if a
        step with other settings drew them, or none did."""
        if round_ != self._round or client not in self._of:
            return None
        kind, config, batches = self._of.pop(client)
        return batches if kind is type(step) and config == step.config else None
