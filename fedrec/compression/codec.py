# SPDX-License-Identifier: Apache-2.0
"""A round's compression: what a client sends, and what the server makes of it.

Both ends draw what they have in common from the experiment's seed and the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedrec.components.registry import COMPRESSION
from fedrec.compression.base import Compression, Payload
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_of
from fedrec.privacy.clipping import Clip
from fedrec.protocol.sparse_update import Change, SparseUpdate, scaled
from fedrec.rng import stream

Payloads = Mapping[str, Payload]
"""What is sent of an update, by parameter."""
_ATTEMPTS = 60


@dataclass(frozen=True, eq=False)
class Codec:
    """Encodes and decodes the updates of a round.

    Attributes:
        compression: how.
        seed: of the experiment.
        round: the round.
    """

    compression: Compression
    seed: int
    round: int

    @classmethod
    def of(cls, experiment: Experiment, round_: int) -> Self | None:
        """That of an experiment; None: it has no compression."""
        if experiment.compression is None:
            return None
        return cls(component_of(COMPRESSION, experiment.compression), experiment.seed, round_)

    def encoded(
        self,
        client: int,
        update: Mapping[str, Change],
        shapes: Mapping[str, tuple[int, ...]],
        clip: Clip | None,
    ) -> tuple[Payloads, dict[str, Change]]:
        """What a client sends, and what is decoded of it.

        Rounding makes some updates longer. An update whose decoded form exceeds the clip is scaled
        down and encoded again, with the same random numbers, until it does not. On a grid the
        excess falls more slowly than the factor, hence the attempts.
        """
        factor = 1.0
        for _ in range(_ATTEMPTS):
            payloads = self._payloads(client, update, factor)
            decoded = self.decoded(payloads, shapes)
            further = 1.0 if clip is None else clip_factor(decoded, clip)
            if further == 1:
                return payloads, decoded
            factor *= further
        payloads = self._payloads(client, update, 0.0)
        return payloads, self.decoded(payloads, shapes)

    def decoded(
        self, payloads: Payloads, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Change]:
        """The changes that the server makes of what a client sent."""
        return {
            name: self.compression.decode(payload, shapes[name], self._common(name))
            for name, payload in payloads.items()
        }

    def _payloads(self, client: int, update: Mapping[str, Change], factor: float) -> Payloads:
        random = stream(self.seed, "compression", client, self.round)
        return {
            name: self.compression.encode(
                change if factor == 1 else scaled(change, factor), random, self._common(name)
            )
            for name, change in update.items()
        }

    def _common(self, name: str) -> np.random.Generator:
        return stream(self.seed, f"compression/{name}", self.round)


def clip_factor(update: Mapping[str, Change], clip: Clip) -> float:
    """Factor that brings a whole update within a clip; 1: it is."""
    parts = {
        name: change.values if isinstance(change, SparseUpdate) else change
        for name, change in update.items()
    }
    return float(clip.factors(np.array([clip.measure(parts)]))[0])
