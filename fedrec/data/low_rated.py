# SPDX-License-Identifier: Apache-2.0
"""The setting of systems that count rated items that are not positive, with a smaller weight than
positive ones.

A user chose the items that it rated, which tells something about its preferences even where it does
not like them. Only known rows have a weight: held-out rows that are not positive stay unknown, and
all items that are not positive are ranked as before.
"""

from pydantic import Field

from fedrec.config import Config


class LowRatedConfig(Config):
    """Settings of the weights in a user's history."""

    low_rated: float = Field(default=0.0, ge=0, le=1)
    """Weight of a rated item that is not positive in a user's history, where a positive one has 1;
    0 leaves these items out. Of no use where the data have no ratings."""
