# SPDX-License-Identifier: Apache-2.0
"""A server learning rate that may decay over the rounds."""

from __future__ import annotations

from pydantic import Field

from fedrec.config import Config


class ServerRate(Config):
    """Settings of strategies with a server learning rate."""

    server_lr: float = Field(default=1.0, gt=0)
    """Server learning rate."""
    anneal_rounds: int | None = Field(default=None, ge=1)
    """Number of rounds T over which the server rate falls linearly to zero: `server-lr * (1 - (t -
    1) / T)` in round t, and 0 after T."""
    anneal_after: int = Field(default=0, ge=0)
    """Rounds at the full rate before it begins to fall, such as those of an earlier phase; rounds
    are counted from the experiment's first."""

    def rate(self, round_number: int) -> float:
        """The server rate of a round, from 1."""
        if self.anneal_rounds is None:
            return self.server_lr
        falling = max(0, round_number - 1 - self.anneal_after)
        return self.server_lr * max(0.0, 1.0 - falling / self.anneal_rounds)
