# SPDX-License-Identifier: Apache-2.0
"""The `priors` table of a step."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from fedrec.config import Config


class PriorsConfig(Config):
    """User-level priors (equation 11)."""

    source: str = Field(default="onehot", pattern=r"^(onehot|glove:.+|table:.+)$")
    """Word vectors of the metadata: `onehot` (no similarity, no file), `glove:FILE` (a GloVe text
    file), `table:FILE` (a JSON object from words to lists of numbers of equal length)."""
    sha256: str | None = None
    """Required SHA-256 digest of the file; default: any."""
    features: tuple[str, ...] = ()
    """User features to use; default: all."""
    words: dict[str, str] = Field(default_factory=lambda: {"M": "male", "F": "female"})
    """Words to look up instead of labels."""
    noise: bool = True
    """Whether noise is added to the priors, as in the paper; otherwise they never leave the device,
    and the noise on gradients also protects the priors."""
    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of a user's budget (squared sensitivity / noise) for noisy priors, if the noise is
    calibrated to a number of uploads."""

    def files(self) -> Iterator[str]:
        """The file of the word vectors, if there is one."""
        kind, _, name = self.source.partition(":")
        if kind != "onehot":
            yield name
