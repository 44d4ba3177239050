# SPDX-License-Identifier: Apache-2.0
"""Clipping of updates, with its sensitivity (PrivRec equation 7), and the clip and noise of a
client's update before it leaves the device.

The norm is taken over all parameters of an update together. Edge cases, the same in one update and
in many:

| update              | becomes                                          |
|---------------------|--------------------------------------------------|
| norm <= S           | itself                                           |
| norm > S            | scaled to norm S, less one part in a million     |
| zero                | itself                                           |
| any NaN or infinity | zero; the client counts, with its own noise      |

The millionth is for float32: rounded coordinates of a vector of norm S may have a norm just above
S.

Where this differs from the paper: algorithm 2 clips in every local epoch without starting again
from what it clipped, so only the last clip has an effect; here an update is clipped only once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedrec.errors import ExperimentError
from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.rng import NoiseSource
from fedrec.runtime.files import parse_json

_ROUNDING = 1e-6
Floating = TypeVar("Floating", np.float32, np.float64)


@dataclass(frozen=True)
class Clip:
    """Bound on the norm of an update, and so on the sensitivity of a sum of updates.

    Attributes:
        norm: the bound S, > 0 and finite.
        order: 2 for the L2 (Frobenius) norm, 1 for the L1 norm.
        contributions: `non-negative` only for updates that have no signs by construction, see
            `fedrec.privacy.accounting.sampling`.
    """

    norm: float
    order: int = 2
    contributions: Contributions = "signed"

    def __post_init__(self) -> None:
        if not 0 < self.norm < math.inf or self.order not in (1, 2):
            raise ExperimentError(
                f"invalid clip norm {self.norm} in L{self.order}",
                fix="set privacy.clip-norm to a finite number > 0",
            )

    def at(self, norm: float) -> Clip:
        """Return the clip with another bound."""
        return replace(self, norm=norm)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Largest change of a sum of clipped updates between neighbours, in the norm of the clip: S
        under add-remove; under replace-one 2S, or sqrt(2) S for updates without signs in L2."""
        if adjacency == "add-remove":
            return self.norm
        acute = self.contributions == "non-negative" and self.order == 2
        return (math.sqrt(2.0) if acute else 2.0) * self.norm

    def factors(self, norms: np.ndarray) -> np.ndarray:
        """Scale factor of each update, `float64 [clients]`; 0: replace the update by zeros, even if
        it is not finite.

        Args:
            norms: norm of each client's whole update, `[clients]`; may be NaN or infinite.
        """
        norms = np.asarray(norms, dtype=np.float64)
        finite = np.isfinite(norms)
        shrunk = self.norm / np.where(finite & (norms > 0), norms, 1.0) * (1 - _ROUNDING)
        return np.where(finite, np.where(norms <= self.norm, 1.0, shrunk), 0.0)

    def measure(self, update: Mapping[str, np.ndarray]) -> float:
        """Norm of a whole update, over all its parameters together, in float64."""
        values = [np.asarray(value, dtype=np.float64) for value in update.values()]
        largest = max((float(np.abs(value).max(initial=0.0)) for value in values), default=0.0)
        if largest == 0 or not math.isfinite(largest):
            return largest if not any(np.isnan(value).any() for value in values) else math.nan
        # In units of the largest coordinate, because squares of huge numbers overflow.
        if self.order == 1:
            return largest * sum(float(np.abs(value / largest).sum()) for value in values)
        return largest * math.sqrt(sum(float(np.square(value / largest).sum()) for value in values))

    def factor(self, update: Mapping[str, np.ndarray]) -> float:
        """Scale factor of a whole update, see `factors`."""
        return float(self.factors(np.array([self.measure(update)]))[0])

    def __call__(self, update: Mapping[str, NDArray[Floating]]) -> dict[str, NDArray[Floating]]:
        """Clip an update; types and shapes stay the same."""
        factor = self.factor(update)
        if factor == 1:
            return {name: value.copy() for name, value in update.items()}
        return {
            name: (value * factor).astype(value.dtype) if factor else np.zeros_like(value)
            for name, value in update.items()
        }


@dataclass(frozen=True)
class Protection:
    """Clip, and noise if clients add it.

    Attributes:
        clip_norm: bound S on the norm of a client's whole update, over `names` together.
        order: 2 for the L2 norm, 1 for L1.
        names: parameters that may leave the device; updates of all others count as zero.
        noise_scale: noise that each client adds to its clipped update; 0 where the server adds it.
        mechanism: the noise, as in the settings.
        silent: whether losses and numbers of examples stay on the device.
    """

    clip_norm: float
    order: int
    names: tuple[str, ...]
    noise_scale: float = 0.0
    mechanism: str | dict[str, Any] = "gaussian"
    silent: bool = False

    def text(self) -> str:
        """Return the protection as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Protection:
        """Parse JSON written by `text`."""
        table = parse_json(text)
        return cls(**{**table, "names": tuple(table["names"])})

    @property
    def clip(self) -> Clip:
        """Clip of a client's update."""
        return Clip(self.clip_norm, self.order)

    def noisy(
        self, update: Mapping[str, np.ndarray], source: NoiseSource, *address: int
    ) -> dict[str, np.ndarray]:
        """Add the client's noise to every coordinate of a clipped update, changed or not.

        Args:
            update: the clipped update, whole arrays of `names`; noise is added before anything is
                rounded.
            source: source of the noise.
            address: round and client.
        """
        mechanism = mechanisms.mechanism_of(self.mechanism)
        return mechanisms.add_noise(mechanism, update, self.noise_scale, source, *address)
