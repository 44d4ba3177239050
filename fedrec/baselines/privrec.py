# SPDX-License-Identifier: Apache-2.0
"""PrivRec's network trained centrally (Wang et al. 2021, table 2, row PrivRec-CEN).

Equivalent to its federated training, without clients and messages: REPTILE (their equation 6) over
users. Each user trains a copy of the network on its liked items and drawn negatives, and the shared
network moves towards the mean of the copies. Users have no parameters; a copy is fine-tuned for
each user to be scored, as on a device.

Where this differs from the paper: it does not say how PrivRec-CEN is trained; training on mixed
batches of all users without fine-tuning learns little more than popularity, because users enter by
side features only. The settings are those of the shipped experiment `privrec-ml1m`; its page
describes all differences.
"""

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.training import own_seed
from fedrec.config import Width
from fedrec.data.client_data import draw_negatives
from fedrec.data.interactions import FeatureNames
from fedrec.device import one_thread
from fedrec.models.privrec import PrivRec as PrivRecModel
from fedrec.models.privrec import PrivRecConfig as PrivRecModelConfig
from fedrec.nn.layers import Activation
from fedrec.rng import stream, torch_stream
from fedrec.training.block import Batches, Block
from fedrec.training.kernel import kernel_refusal, train_block
from fedrec.training.sgd import SgdSettings, descend

_LAYER_RATE = 0.3  # factor on the learning rate of the layers, as in privrec-ml1m
# that of the item embeddings, which are trained in the last epoch only, and not in fine-tuning
_ITEM_RATE = 1000.0


class PrivrecConfig(PrivRecModelConfig):
    """Settings of centrally trained PrivRec, in addition to those of the network."""

    hidden: tuple[Width, ...] = (64, 32, 16, 8)
    """Widths of the hidden layers."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    rounds: int = Field(default=80, ge=1)
    """Rounds of REPTILE, with a server rate that falls linearly to almost zero."""
    users: int = Field(default=20, ge=1)
    """Users per round."""
    epochs: int = Field(default=5, ge=1)
    """Local epochs of each user, in training and in fine-tuning."""
    batch_size: int = Field(default=128, ge=1)
    """Examples per gradient step."""
    negatives: int = Field(default=40, ge=0)
    """Negatives sampled per liked item."""
    learning_rate: float = Field(default=0.3, gt=0)
    """Learning rate."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial parameters and of all random draws."""


class Privrec(Baseline):
    """PrivRec's network, trained by REPTILE over users."""

    name = "privrec"
    Config = PrivrecConfig
    paper = "PrivRec (Wang et al. 2021), table 2"
    config: PrivrecConfig

    @classmethod
    def features_used(cls, config: PrivrecConfig, known: FeatureNames) -> FeatureNames:
        """Side features that the network uses."""
        return PrivRecModel.features_used(config, known)

    @one_thread()
    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, on a processor with one thread."""
        config = self.config
        able = _able(histories)
        self._model = PrivRecModel(config, histories.schema())
        fresh = self._model.initial(torch_stream(config.seed, "baseline-privrec"))
        theta = {name: value.to(self.device) for name, value in fresh.items()}
        for round_ in range(config.rounds if len(able) else 0):
            draw = stream(config.seed, "baseline-privrec-users", round_)
            chosen = draw.choice(able, min(config.users, len(able)), replace=False)
            randoms = [
                stream(config.seed, "baseline-privrec-examples", round_, user)
                for user in chosen.tolist()
            ]
            copies = self._copies(theta, histories.take(chosen), randoms, _ITEM_RATE)
            rate = (1 - round_ / config.rounds) / len(copies)
            theta = {
                name: value
                + rate * sum((copy[name][0] - value for copy in copies), torch.zeros(()))
                for name, value in theta.items()
            }
        self._theta = theta

    @one_thread()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of each user's fine-tuned copy, `float32 [users, items]`; of the shared network
        for users without items."""
        shared = {name: value.unsqueeze(0) for name, value in self._theta.items()}
        rows = [torch.zeros(0, histories.num_items, device=self.device)]
        able = set(_able(histories).tolist())
        for user in range(histories.num_users):
            alone = histories.block(user, user + 1)
            parameters = shared
            if user in able:
                random = stream(own_seed(alone.items), "baseline-privrec-fine-tuning")
                parameters = self._copies(self._theta, alone, [random], 0.0)[0]
            with torch.no_grad():
                codes = tuple(torch.from_numpy(code).to(self.device) for code in self._codes(alone))
                rows.append(self._model.scores(parameters, codes))
        return torch.cat(rows)

    def _copies(
        self,
        theta: Mapping[str, Tensor],
        histories: Histories,
        randoms: list[np.random.Generator],
        item_rate: float,
    ) -> list[Mapping[str, Tensor]]:
        """Yield the fine-tuned parameters of each user, `[1, ...]` each, in order."""
        config = self.config
        rates = {name: _LAYER_RATE for name in theta if name.startswith("layer")}
        rates["item.id"] = item_rate
        sgd = SgdSettings(config.learning_rate, rates=rates, late=frozenset({"item.id"}))
        codes = self._codes(histories)
        distinct = histories.distinct()
        lists = np.split(distinct.items, distinct.offsets[1:-1])
        batches = [
            self._batches(liked, histories.num_items, random)
            for liked, random in zip(lists, randoms, strict=True)
        ]
        # the order of clients in a block
        order = np.argsort([-len(batch.sizes) for batch in batches], kind="stable")
        users = [tuple(code[user] for code in codes) for user in order]
        block = Block.of(users, [batches[user] for user in order], self.device)
        kernel = self._model.kernel()
        if kernel is not None and kernel_refusal(kernel, sgd, self.device) is None:
            trained = train_block(kernel, theta, block, sgd)
        else:
            trained = descend(self._model, theta, block, sgd)
        return [trained.parameters_of(index) for index in np.argsort(order).tolist()]

    def _batches(self, liked: np.ndarray, num_items: int, random: np.random.Generator) -> Batches:
        """Batches of one user: liked items and drawn negatives, reshuffled in each epoch."""
        drawn = draw_negatives(liked, num_items, self.config.negatives * len(liked), random)
        items = np.concatenate([liked, drawn])
        labels = (np.arange(len(items)) < len(liked)).astype(np.float32)
        orders = [random.permutation(len(items)) for _ in range(self.config.epochs)]
        return Batches.cut(
            [(items[order], labels[order]) for order in orders], self.config.batch_size
        )

    def _codes(self, histories: Histories) -> list[np.ndarray]:
        """Category codes of users' features, see `Histories.codes`."""
        return histories.codes(self._model.schema, histories.numbers)


def _able(histories: Histories) -> np.ndarray:
    """Users with training data (at least one liked and one other item), `int64 [users]`."""
    counts = np.diff(histories.csr().indptr)
    return np.flatnonzero((counts > 0) & (counts < histories.num_items))
