# SPDX-License-Identifier: Apache-2.0
"""A step size on the server that may fall over the rounds."""

from __future__ import annotations

from pydantic import Field

from fedrec.config import Config


class ServerRate(Config):
    """Settings of every strategy whose server takes steps of a size of its own."""

    server_lr: float = Field(default=1.0, gt=0)
    """Step size of the server."""
    anneal_rounds: int | None = Field(default=None, ge=1)
    """T, over which the server rate falls linearly: round t has `server-lr * (1 - (t - 1) / T)`,
    none after T."""

    def rate(self, round_number: int) -> float:
        """The server rate of a round, from 1."""
        whole = self.anneal_rounds
        left = 1.0 if whole is None else max(0.0, 1.0 - (round_number - 1) / whole)
        return self.server_lr * left
