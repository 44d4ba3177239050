# SPDX-License-Identifier: Apache-2.0
"""PrivRec's recommendation network, also with an item-based score.

PrivRec's recommendation network (Wang et al. 2021, section 2.1, equations 1 and 2).

A user enters by side features only, never by an id, so that nothing shared identifies anyone and
new users need no new parameters. An item enters by its id and its features. The embeddings are
joined, pass through hidden layers, and end in one output.

Where this differs from the paper:

- Equation 1 has ReLU in the hidden layers, section 4.1 says sigmoid: `activation` chooses, ReLU by
  default.
- The widths of the four hidden layers are not given there; they default to 256, 128, 64, 32.
- The paper makes each of the 18 genres a one-hot feature of its own. Here a feature with several
  values (genres) has one embedding table, and an item's rows in it are averaged, so the input does
  not grow with the number of genres.
- f_u and f_v are embeddings alone, as algorithm 1 lists no other parameters (theta = {U, V, W, b}).
- `item-bias` adds one number per item to the output, so that the embeddings need not learn
  popularity.
- `item-start = "features"` initialises item embeddings from public item features, so that local
  adaptation is useful before anything is learned from users. In the paper they are random, or
  trained in its first stage.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import Model, Parameters, Users, grown_biases
from fedrec.nn import layers
from fedrec.nn.layers import Activation, ItemFeature, ItemVectors, KernelModel, Layer


class PrivRecConfig(Config):
    """Settings of PrivRec's network."""

    embedding: Width = 64
    """Width of the embedding of each categorical feature (paper: 64)."""
    hidden: tuple[Width, ...] = (256, 128, 64, 32)
    """Widths of the hidden layers (paper: four layers, widths not given)."""
    activation: Activation = "relu"
    """Activation of the hidden layers."""
    embedding_std: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial embeddings."""
    item_bias: bool = False
    """Whether each item has a bias, `item.bias`, initially zero, which is added to the output."""
    item_start: Literal["random", "features"] = "random"
    """Initial item embeddings: `random`, or the first principal components of the items' features
    (`features`)."""
    features: bool = True
    """Whether features of users and items are used; `false`: only item ids (FOFL-SELF)."""
    item_ids: bool = True
    """Whether items have embeddings of their own; `false`: an item is its vectors and categories
    alone, so that new items can be ranked."""
    output_start: Literal["random", "zero"] = "random"
    """Initial weights of the last layer: `random`, or `zero`, so that the initial model ranks by
    item biases only."""


class PrivRec(Model):
    """The network of PrivRec, for implicit feedback (logits) and for ratings (linear output)."""

    name = "privrec"
    Config = PrivRecConfig
    paper = "PrivRec (Wang et al. 2021), eq. 1-2"
    item_tables = ("item.id",)
    config: PrivRecConfig

    def __init__(self, config: PrivRecConfig, schema: Schema) -> None:
        super().__init__(config, schema if config.features else _bare(schema))
        schema = self.schema
        # configuration of this model
        ids = ("item.id",) if config.item_ids else ()
        self.item_tables = ids + ("item.bias",) * config.item_bias  # type: ignore[misc]
        if not (config.item_ids or schema.item_features.features or schema.item_features.vectors):
            raise ExperimentError(
                "items have neither ids nor features",
                expected="vectors or categories of the items, with model.item-ids = false",
                got="none",
                fix="set dataset.item-vectors, or leave out model.item-ids",
            )
        self._item_features = [_ItemFeature(feature) for feature in schema.item_features.features]
        self._item_vectors = [ItemVectors(vectors) for vectors in schema.item_features.vectors]
        self._user_tables = [f"user.{name}" for name, _ in schema.user_features]
        numbers = range(len(config.hidden) + 1)
        self._weights, self._biases = (
            [f"layer{n}.{kind}" for n in numbers] for kind in ("weight", "bias")
        )

    @classmethod
    def features_used(cls, config: PrivRecConfig, known: FeatureNames) -> FeatureNames:
        """All side features but texts, or none with `features = false`."""
        return known._replace(item_texts=()) if config.features else FeatureNames()

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, He-uniform (ReLU) or Glorot-uniform weights `[in, out]`, zero
        biases."""
        tables = {f"user.{name}": size for name, size in self.schema.user_features}
        if self.config.item_ids:
            tables["item.id"] = self.schema.num_items
        tables |= {f"item.{f.name}": len(f.categories) for f in self.schema.item_features.features}
        tables |= {vectors.name: vectors.width for vectors in self._item_vectors}
        width = self.config.embedding
        std = self.config.embedding_std
        parameters = {
            name: torch.randn(size, width, generator=generator).mul_(std)
            for name, size in tables.items()
        }
        widths = [width * len(tables), *self.config.hidden, 1]
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            start = layers.kaiming if self.config.activation == "relu" else layers.glorot
            parameters[f"layer{layer}.weight"] = start(fan_in, fan_out, generator)
            parameters[f"layer{layer}.bias"] = torch.zeros(fan_out)
        if self.config.item_ids and self.config.item_start == "features":
            parameters["item.id"] = _principal_components(self.schema.item_features, width)
        if self.config.output_start == "zero":
            parameters[f"layer{len(widths) - 2}.weight"].zero_()
        if self.config.item_bias:
            parameters["item.bias"] = torch.zeros(self.schema.num_items, 1)
        return parameters

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. The first layer is applied to the
        user part once per client, not once per item."""
        rows = items if rows is None else rows
        tables = [parameters[name] for name in self._user_tables]
        user = [
            layers.mean_rows(table, layers.shares_or_codes(codes.unsqueeze(1), table.shape[1]))
            for table, codes in zip(tables, users[: len(tables)], strict=True)
        ]
        item = [
            feature.rows(parameters, items)
            for feature in (*self._item_features, *self._item_vectors)
        ]
        if self.config.item_ids:
            item.insert(0, layers.gather_rows(parameters["item.id"], rows))
        weights = [parameters[name] for name in self._weights]
        biases = [parameters[name] for name in self._biases]
        parts = [user, item] if user else [item]
        logits = layers.perceptron(parts, weights, biases, self.config.activation)
        if self.config.item_bias:
            logits = logits + layers.gather_rows(parameters["item.bias"], rows).squeeze(-1)
        return logits

    def kernel(self) -> KernelModel | None:
        """Declaration for native code; None with dense vectors or without item ids, which it does
        not support."""
        return self._kernel if self.config.item_ids and not self._item_vectors else None

    def grown(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Model.grown`: only a bias, that of the median item, is added, as no item has an
        embedding of its own."""
        if self.config.item_ids:
            return super().grown(parameters)
        bias = parameters.get("item.bias")
        if bias is None:
            return dict(parameters)
        return {**parameters, "item.bias": grown_biases(bias, self.schema.num_items)}

    @cached_property
    def _kernel(self) -> KernelModel:
        features = self.schema.item_features.features
        return KernelModel(
            layers=tuple(map(Layer, self._weights, self._biases)),
            activation=self.config.activation,
            loss="logistic" if self.schema.task == "ranking" else "squared",
            user_tables=tuple(self._user_tables),
            item_table="item.id",
            item_features=tuple(
                ItemFeature(f"item.{feature.name}", feature.padded()) for feature in features
            ),
            item_bias="item.bias" if self.config.item_bias else None,
        )


def _bare(schema: Schema) -> Schema:
    """Schema without features of users and items."""
    none = FeatureTable(schema.num_items, ())
    return dataclasses.replace(schema, item_features=none, user_features=(), user_words=())


def _principal_components(features: FeatureTable, width: int) -> Tensor:
    """Scores `float32 [items, width]` of the items on the first principal components of their
    features.

    An item's categories of one feature are an indicator vector of length 1, as is a dense vector;
    the vectors of its features are joined. Components beyond the rank are zero. The largest loading
    of a component is positive, so signs do not depend on the solver.
    """
    tables = [
        layers.row_shares(torch.from_numpy(f.padded()), len(f.categories)).double()
        for f in features.features
    ]
    tables += [torch.from_numpy(vectors.standardised()).double() for vectors in features.vectors]
    if not tables:
        raise ExperimentError(
            "item embeddings cannot be initialised from features",
            expected="a dataset with item features",
            got="none",
            fix="set model.item-start = 'random'",
        )
    joined = torch.cat([F.normalize(table) for table in tables], 1)
    centred = joined - joined.mean(0)
    _, values, loadings = torch.linalg.svd(centred, full_matrices=False)
    components = loadings[values > 1e-9 * values.max()][:width]
    signs = components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    scores = centred @ (components * signs).T
    return torch.nn.functional.pad(scores, (0, width - scores.shape[1])).float()


class _ItemFeature:
    """Mean embedding of an item feature with public, fixed categories."""

    def __init__(self, feature: Feature) -> None:
        self.name = f"item.{feature.name}"
        codes = torch.from_numpy(feature.padded())
        self._shares = layers.shares_or_codes(codes, len(feature.categories))

    def rows(self, parameters: Parameters, items: Tensor) -> Tensor:
        """Mean embeddings of items `int64 [C, B]`, `[C, B, d]`."""
        if self._shares.device != items.device:
            self._shares = self._shares.to(items.device)
        shares = self._shares.index_select(0, items.reshape(-1)).view(*items.shape, -1)
        return layers.mean_rows(parameters[self.name], shares)


# PrivRec's network plus an item-based score: an extension of Wang et al. 2021.
#
#     score(u, i) = network(u, i) + 12 cos(e_i, p_u)
#
# where p_u, the user's profile, is the direction of the sum of the unit embeddings of the user's
# positives (`fedrec.pretext`). The second term alone is an item-kNN on the cosines of the
# items' embeddings, which a self-supervised stage one with `encoder = "mean"` learns to rank by.
# Few epochs of fine-tuning make less of these embeddings.
#
# Step `sgd-profile` trains the network as local SGD does and takes the profile on the device, where
# it stays. Without a profile, as before local training, the term is zero.

ITEMS = "item.id"
PROFILE = "profile"
_SIMILARITY = 12.0


class PrivRecProfileConfig(PrivRecConfig):
    """Settings of PrivRec's network and of the similarity term."""

    item_ids: Literal[True] = True
    """The profile is made of the items' embeddings."""


class PrivRecProfile(PrivRec):
    """PrivRec's network plus the similarity of an item to the user's own items."""

    name = "privrec-profile"
    Config = PrivRecProfileConfig
    tasks = ("ranking",)
    paper = "an extension of PrivRec (Wang et al. 2021)"
    config: PrivRecProfileConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise PrivRec's parameters and a zero profile, `[embedding]`."""
        return {**super().initial(generator), PROFILE: torch.zeros(self.config.embedding)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        embedded = layers.gather_rows(parameters[ITEMS], items if rows is None else rows)
        units = F.normalize(embedded, dim=-1)
        cosines = torch.bmm(units, parameters[PROFILE].unsqueeze(-1)).squeeze(-1)
        return super().predict(parameters, users, items, rows) + _SIMILARITY * cosines

    def kernel(self) -> None:
        """No declaration for native code, which has no profiles; the step trains `PrivRec`."""
        return None
