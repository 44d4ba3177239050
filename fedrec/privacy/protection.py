# SPDX-License-Identifier: Apache-2.0
"""Clip and noise of a client's update before it leaves the device, as specified in the training
message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.mechanisms import base as mechanisms
from fedrec.rng import NoiseSource
from fedrec.runtime.files import parse_json


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

    @classmethod
    def of(
        cls, config: PrivacyConfig, clip: Clip, names: Iterable[str], *, noise_scale: float = 0.0
    ) -> Protection:
        """Make the protection configured for a phase.

        Args:
            config: the settings.
            clip: of the clients' updates.
            names: parameters that may leave the device.
            noise_scale: noise that each client adds.
        """
        return cls(
            clip_norm=clip.norm,
            order=clip.order,
            names=tuple(names),
            noise_scale=noise_scale,
            mechanism=config.mechanism,
            silent=config.mode == "secure",
        )

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
