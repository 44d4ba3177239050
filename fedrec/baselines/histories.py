# SPDX-License-Identifier: Apache-2.0
"""Training of models of whole histories in one place, on batches of users.

The weight beta of a divergence from a prior rises linearly to its last value over all steps.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.training import HELD_OUT, PatienceConfig, train
from fedrec.data.time_weighting import last_items
from fedrec.models.base import HistoryModel
from fedrec.rng import stream, torch_stream

_MANY = 1e9  # multiplications of a step that takes tenths of a second


class HistoriesConfig(PatienceConfig):
    """Settings of the training of models of histories."""

    beta: float = Field(default=0.5, ge=0)
    """Final weight beta of a divergence from a prior, for models that have one."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial parameters, the order of users, dropout and codes."""


def train_histories(
    model: HistoryModel,
    histories: Histories,
    config: HistoriesConfig,
    generator: torch.Generator,
    device: torch.device,
    *,
    fused: bool = True,
) -> dict[str, Tensor]:
    """Train a model on users' histories.

    Args:
        model: the model.
        histories: of the training users; those without a positive item are left out.
        config: how.
        generator: of the initial parameters, the order of users, and what the model draws.
        device: where the parameters are.
        fused: see `fedrec.baselines.training.train`.

    Returns:
        Parameters `[1, ...]`.
    """
    drawn = model.initial(generator)
    values = [value.unsqueeze(0).to(device).requires_grad_() for value in drawn.values()]
    users = torch.from_numpy(histories.offsets).diff().nonzero()[:, 0]
    held_out = users[:0]
    if config.patience is not None:
        out = stream(config.seed, "baseline-held-out").random(len(users)) < HELD_OUT
        held_out = users[torch.from_numpy(out)]
        users = users[torch.from_numpy(~out)]
    steps = -(-len(users) // config.batch_size)
    numbers = sum(value.numel() for value in values)

    def loss(
        values: Sequence[Tensor], some: Tensor, source: torch.Generator, beta: float
    ) -> Tensor:
        rows = _given(model, histories.take(some.numpy()), more=1).unsqueeze(0).to(device)
        parameters = dict(zip(drawn, values, strict=True))
        return model.training_loss(parameters, rows, source, beta).mean()

    def epoch(number: int) -> Iterator[tuple[Tensor, float]]:
        order = users[torch.randperm(len(users), generator=generator)]
        for place, batch in enumerate(order.split(config.batch_size)):
            done = number * steps + place + 1
            yield batch, config.beta * done / (config.epochs * steps)

    @torch.no_grad()
    def measured(values: Sequence[Tensor]) -> float:
        return float(
            loss(values, held_out, torch_stream(config.seed, "baseline-held-out"), config.beta)
        )

    last = train(
        values,
        config,
        epoch,
        lambda batch: loss(values, batch[0], generator, batch[1]).backward(),
        steps=steps,
        fused=fused,
        patience=config.patience,
        held_out=measured if len(held_out) else None,
        long_steps=numbers * config.batch_size * (model.longest or 1) >= _MANY,
    )
    return dict(zip(drawn, last, strict=True))


@torch.no_grad()
def history_scores(
    model: HistoryModel,
    parameters: Mapping[str, Tensor],
    histories: Histories,
    device: torch.device,
) -> Tensor:
    """Scores of the catalogue for users' histories, `float32 [users, items]`; parameters are
    `[1, ...]`."""
    return model.history_scores(parameters, _given(model, histories).unsqueeze(0).to(device))[0]


def _given(model: HistoryModel, histories: Histories, more: int = 0) -> Tensor:
    """What the model takes of users: weights of the catalogue, or their last items, so many
    `more`."""
    if model.longest is None:
        return histories.matrix()
    own = histories.in_order()
    return torch.from_numpy(last_items(own.offsets, own.items, model.longest + more))


class HistoryBaseline(Baseline):
    """A model of histories whose settings are the baseline's.

    Attributes:
        network: the model.
        stream: name of its random stream.
    """

    network: type[HistoryModel]
    stream: str
    config: HistoriesConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters; users without a positive item are left out."""
        generator = torch_stream(self.config.seed, self.stream)
        self.model = self.network(self.config, histories.schema())
        self.parameters = train_histories(
            self.model, histories, self.config, generator, self.device, fused=False
        )

    def scores(self, histories: Histories) -> Tensor:
        """Scores of each user's history, `float32 [users, items]`."""
        return history_scores(self.model, self.parameters, histories, self.device)
