# SPDX-License-Identifier: Apache-2.0
"""Local mini-batch SGD, also with a profile of the user's own items.

Local mini-batch SGD on one client's data (PrivRec algorithm 1, lines 9 to 18).

`train_block` trains many clients at once (`fedrec.training`), and `train_in_kernel` in native code
(`fedrec.training`), from the same random draws.

Where this differs from the paper: it gives no learning rate, batch size or number of negatives, so
they are settings. The paper turns ratings of 3 and below into negatives; here `low-rated` chooses,
and unobserved items are drawn as further negatives, because ranking is against items the user never
saw. In the paper, all parameters move in every step with one learning rate. With `rates` and
`late-parameters` some can move faster, slower or only after the others have adapted: a network that
is free to move the embedding of each item memorises its positives instead of learning what they
have in common (ANIL, Raghu et al. 2020, and FedRep, Collins et al. 2021, also treat body and head
of a network differently).
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Literal

import torch
from pydantic import Field

from clients.step import PrivateParameters, Train
from clients.steps.descent import DescentConfig, DescentStep, check_patterns, rates_by_name
from fedrec.config import fits
from fedrec.models.base import Parameters
from fedrec.models.privrec import ITEMS, PROFILE, PrivRec, PrivRecProfile
from fedrec.nn.layers import KernelModel
from fedrec.pretext import mean_directions, recommender_part
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw
from fedrec.training.kernel import kernel_refusal, train_block
from fedrec.training.results import BlockUpdate, Dense
from fedrec.training.sgd import SgdSettings


class SgdConfig(DescentConfig, PrivateParameters):
    """Settings of local SGD."""

    negatives: int = Field(default=4, ge=0)
    """Unobserved items per positive (ranking only), drawn once a round uniformly outside the
    training positives."""
    low_rated: Literal["ignore", "negative"] = "ignore"
    """What a training row that is not positive counts as (ranking only)."""
    rates: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factors on the learning rate by pattern of parameter names, such as `{"item.id" = 500.0}`; 0
    keeps a parameter as it is. No parameter may fit two patterns, as tables have no order."""
    late_parameters: tuple[str, ...] = ()
    """Patterns of parameters that move in the last epoch only, when the others have adapted."""


class Sgd(DescentStep):
    """Plain local SGD."""

    name = "sgd"
    Config = SgdConfig
    paper = "PrivRec (Wang et al. 2021), algorithm 1"
    config: SgdConfig

    def draw(self) -> ExampleDraw:
        """The rows and negatives of each epoch, shuffled."""
        config = self.config
        return ExampleDraw(
            config.epochs,
            config.batch_size,
            config.negatives,
            low_rated=config.low_rated == "negative",
        )

    @cached_property
    def _kernel(self) -> KernelModel | None:
        return self.model.kernel()

    def trained(self, parameters: Parameters) -> Parameters:
        """All but those of self-supervised training."""
        return recommender_part(parameters)

    def in_kernel(self) -> Train | str:
        """Plain SGD of a model that declares a kernel."""
        kernel = self._kernel
        return kernel_refusal(kernel, self.config.sgd(), self.device) or self._train_in_kernel

    def _train_in_kernel(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        trained = self.trained(parameters)
        settings = self.settings(list(trained))
        moved = train_block(self._kernel, trained, block, settings, client_params)
        return replace(moved, start=parameters)

    def settings(self, names: list[str]) -> SgdSettings:
        rates = rates_by_name(names, self.config.rates)
        check_patterns(names, self.config.late_parameters, "late-parameters")
        late = frozenset(name for name in names if fits(name, self.config.late_parameters))
        return replace(super().settings(names), rates=rates, late=late)


# Local SGD of PrivRec's network, and a profile of the user's own items: an extension of Wang et al.
# 2021 (`fedrec.models.privrec`).
#
# The device takes the profile from the item embeddings as they are after its local training. The
# profile is private: what is sent is the change of the network and of the embeddings, the same as
# from `sgd`. It is taken anew in each round, so a device needs no memory of it.
#
# The term of the profile is not in the local loss. With it there the network learns what the term
# leaves, which ranks worse, in fine-tuning and more so in training.


class SgdProfile(Sgd):
    """Local SGD of the network; afterwards the profile of the user's own items."""

    name = "sgd-profile"
    trains = PrivRecProfile
    private = (PROFILE,)
    paper = "an extension of PrivRec (Wang et al. 2021), algorithm 1"

    def __init__(self, config: SgdConfig, model: PrivRecProfile, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.model = PrivRec(model.config, model.schema)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        return self._with_profiles(super().train_block, parameters, block, client_params)

    def in_kernel(self) -> Train | str:
        train = super().in_kernel()
        return train if isinstance(train, str) else partial(self._with_profiles, train)

    def _with_profiles(
        self,
        train: Train,
        parameters: Parameters,
        block: Block,
        client_params: Parameters | None = None,
    ) -> BlockUpdate:
        """A trained block with the profiles of its clients, `[C, d]`, from the positives in their
        batches."""
        network = {name: value for name, value in parameters.items() if name != PROFILE}
        moved = train(network, block, client_params)
        start = parameters[PROFILE]
        if self.config.epochs:
            table = moved.values(ITEMS)
            liked = torch.zeros(table.shape[:2], dtype=torch.bool, device=table.device)
            rows = block.rows[:, :, : block.items.shape[2]]
            liked.view(-1)[rows[block.labels > 0]] = True
            profiles = mean_directions(table, liked)
        else:
            profiles = (client_params or {}).get(PROFILE, start.expand(len(block), -1))
        changes = {**moved.changes, PROFILE: Dense(profiles, start)}
        return replace(moved, start=parameters, changes=changes)
