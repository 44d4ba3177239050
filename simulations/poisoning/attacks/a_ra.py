# SPDX-License-Identifier: Apache-2.0
"""A-ra (Rong, He and Chen 2022, section 4.2): malicious clients approximate honest users by random
ones and promote the targets for these.

Where this differs from the paper: of models that represent users by features, a made-up user has
random categories; the paper has embeddings alone.
"""

from __future__ import annotations

import torch

from clients.hosting.malicious import MaliciousBlock
from simulations.poisoning.made_up_users import MadeUpUsers
from simulations.poisoning.promotion import Users, made_up_users


class RandomApproximation(MadeUpUsers):
    """Promotes the targets for random users."""

    name = "a-ra"
    paper = "Rong, He and Chen 2022, A-ra"

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """Random users."""
        return made_up_users(block, self.config.users, self.config.user_std, generator)
