# SPDX-License-Identifier: Apache-2.0
"""The `priors` table of a step."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from fedrec.config import Config


class PriorsConfig(Config):
    """User-level priors (equation 11)."""

    source: str = Field(default="onehot", pattern=r"^(onehot|glove:.+|table:.+)$")
    """Vectors of the metadata's words: `onehot` (no similarity, needs nothing), `glove:FILE` (a
    text file of GloVe), `table:FILE` (a JSON object from words to equally long lists of
    numbers)."""
    sha256: str | None = None
    """Digest that the file must have; default: any."""
    features: tuple[str, ...] = ()
    """Kinds of metadata; default: all that users have."""
    words: dict[str, str] = Field(default_factory=lambda: {"M": "male", "F": "female"})
    """Words to look up in place of labels."""
    projection_seed: int = Field(default=0, ge=0)
    """Of the orthogonal matrix that turns vectors into K numbers."""
    noise: bool = True
    """Whether noise is put on the priors, as the paper does; without, they never leave the device,
    and what a gradient tells of them its own noise covers."""
    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of a user's whole budget, in squared sensitivity over noise, that noisy priors take,
    where the noise is calibrated to a number of uploads."""
    smallest_variance: float = Field(default=0.05, gt=0)
    """Lower bound of the variances: noise makes some negative, and a variance of zero allows no
    code but one."""

    def files(self) -> Iterator[str]:
        """The file of the word vectors, if there is one."""
        kind, _, name = self.source.partition(":")
        if kind != "onehot":
            yield name
