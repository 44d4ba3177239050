# SPDX-License-Identifier: Apache-2.0
"""Local SGD of PrivRec's network, and a profile of the user's own items: an extension of Wang et
al. 2021 (`fedrec.models.personal.privrec_profile`).

The device takes the profile from the item embeddings as they are after its local training. The
profile is private: what is sent is the change of the network and of the embeddings, the same as
from `sgd`. It is taken anew in each round, so a device needs no memory of it.

The term of the profile is not in the local loss. With it there the network learns what the term
leaves, which ranks worse, in fine-tuning and more so in training (`docs/papers/privrec.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from clients.steps.sgd import Sgd, SgdConfig
from fedrec.cohort.block import Block
from fedrec.cohort.results import Trained
from fedrec.models.base import Parameters
from fedrec.models.personal.privrec_profile import ITEMS, PROFILE, PrivRecProfile
from fedrec.pretext.mean_encoder import mean_directions


class SgdProfileConfig(SgdConfig):
    """Settings of local SGD."""


class SgdProfile(Sgd):
    """Local SGD of the network; afterwards the profile of the user's own items.

    Attributes:
        keeps: the setting's parameters alone, as the profile is taken anew in each round.
    """

    name = "sgd-profile"
    Config = SgdProfileConfig
    trains = PrivRecProfile
    tasks = ("ranking",)
    private = (PROFILE,)
    paper = "an extension of PrivRec (Wang et al. 2021), algorithm 1"
    config: SgdProfileConfig

    def __init__(
        self, config: SgdProfileConfig, model: PrivRecProfile, device: torch.device
    ) -> None:
        super().__init__(config, model, device)
        self.model = model.network

    def train_block(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Trained:
        """Train every client of a block."""
        found = super().train_block(_network(parameters), block, own)
        return self._with_profiles(found, parameters, own)

    def train_in_kernel(
        self, parameters: Parameters, block: Block, own: Parameters | None = None
    ) -> Trained:
        """The same as `train_block` in native code; asked for where `kernel_refusal` gives None."""
        found = super().train_in_kernel(_network(parameters), block, own)
        return self._with_profiles(found, parameters, own)

    @property
    def keeps(self) -> bool:
        return bool(self.config.private_parameters)

    def _with_profiles(
        self, found: Trained, start: Mapping[str, Tensor], own: Mapping[str, Tensor] | None
    ) -> Trained:
        """A trained block with the profiles of its clients, `[C, d]`, from the positives in their
        batches."""
        block = found.block
        table = found.values[ITEMS]
        if self.config.epochs:
            liked = torch.zeros(table.shape[:2], dtype=torch.bool, device=table.device)
            places = block.places[:, :, : block.items.shape[2]]
            liked.view(-1)[places[block.labels > 0]] = True
            profiles = mean_directions(table, liked)
        else:
            profiles = (own or {}).get(PROFILE, start[PROFILE].expand(len(block), -1))
        return replace(found, start=start, values={**found.values, PROFILE: profiles})


def _network(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All parameters but the profile."""
    return {name: value for name, value in parameters.items() if name != PROFILE}
