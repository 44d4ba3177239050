# SPDX-License-Identifier: Apache-2.0
"""Models of whole histories without a network: item-to-item weights, transitions, a taste that each
device fits, factors of items from their content, and neighbourhoods of rated items."""

from collections.abc import Callable, Collection, Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.data.interactions import FeatureNames, LowRatedConfig, RecencyConfig, Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import INIT_STD, HistoryForm, HistoryModel, Parameters, grown_biases
from fedrec.neighbourhood import Scale
from fedrec.sums.fold_in import (
    LogLinear,
    PublicPriorConfig,
    content_columns,
    content_names,
    feature_embeddings,
    prior_features,
)
from fedrec.sums.products import BIAS, chosen_items

# Models that are computed only from products of the items in users' histories.

PRODUCTS = "item.products"
WEIGHTS = "item.weights"


def products_of(parameters: Collection[str]) -> str:
    """Name of the parameter `[m, m]` as whose change clients send the products of m chosen items of
    their histories (step `gram`): `item.products`, or the weights of a model without it."""
    return PRODUCTS if PRODUCTS in parameters else WEIGHTS


class _ProductsConfig(Config):
    """Settings of products of items: the number of items."""

    items: int = Field(default=4000, ge=1, le=20_000)
    """Number m of most popular items in products; at most the catalogue. A device sends at most
    half of m x m numbers of 4 bytes, and receives all if it recommends by weights: 4,000 items take
    64 MB. Memory grows with its square."""


class ProductsModel(HistoryModel):
    """A recommender computed only from products of the items in users' histories.

    Attributes:
        size: m, the number of items that products are about.
    """

    Config = _ProductsConfig
    tasks = ("ranking",)
    config: _ProductsConfig

    def __init__(self, config: _ProductsConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.size = min(config.items, schema.num_items)
        self.form = HistoryForm(low_rated=getattr(config, "low_rated", 0.0))


# A log-linear model of users' likes; each device fits a user's taste to its own rows.
#
#     p(i) proportional to exp(b_i + w . e_i),  w ~ N(0, I)
#
# The items' popularities b and embeddings e are shared. A user's taste w is none of the parameters:
# the device finds the most probable one given its user's rows (`fedrec.sums.fold_in`), as iALS
# folds in a new user with fixed item vectors (Hu et al. 2008). It is recomputed whenever the user
# is ranked for, never sent or stored, so it serves any user with a history and has no training of
# its own.
#
#     item.bias      popularities, as `popularity-start` finds them
#     item.public    coordinates from public features, which stay as they are
#     item.learned   coordinates that strategy `fold-in` learns from the sum of the users' products
#     item.products  users' products are sent as its change; zero on the server
#
# In a history, an item that a user rated and that is not positive counts `low-rated`: who rated a
# film had chosen it, which also informs about its taste.

PUBLIC = "item.public"
LEARNED = "item.learned"


class FoldInConfig(PublicPriorConfig, _ProductsConfig):
    """Settings of the embeddings and of users' histories."""

    items: int = Field(default=600, ge=1, le=20_000)
    """Number m of most popular items in products; at most the catalogue. Memory grows with its
    square: 600 items take 1.4 MB."""
    factors: Width = 64
    """Largest number of learned coordinates."""
    low_rated: float = Field(default=0.3, ge=0, le=1)
    """Weight of a rated item that is not positive in a user's history, where a positive one has 1;
    0 leaves these items out. Not used for data without ratings."""


class FoldIn(ProductsModel):
    """Public and learned item embeddings, with user vectors (tastes) fitted on devices."""

    name = "fold-in"
    Config = FoldInConfig
    paper = "fold-in of iALS (Hu et al. 2008), features as a Gaussian prior"
    config: FoldInConfig

    @classmethod
    def features_used(cls, config: FoldInConfig, known: FeatureNames) -> FeatureNames:
        """Side features of the items; no texts or vectors with an effect variance of 0."""
        return prior_features(config, known)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise public coordinates, at least one column, and zeros; without randomness.

        Raises:
            ExperimentError: items have no such ordered feature.
        """
        items = self.schema.num_items
        public = torch.from_numpy(feature_embeddings(self.schema.item_features, self.config))
        return {
            BIAS: torch.zeros(items, 1),
            PUBLIC: public.float() if public.shape[1] else torch.zeros(items, 1),
            LEARNED: torch.zeros(items, self.config.factors),
            PRODUCTS: torch.zeros(self.size, self.size),
        }

    def grown(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Model.grown`: public coordinates anew, as if the new items had the median
        popularity."""
        public = self.initial(torch.Generator())[PUBLIC]
        more = len(public) - len(parameters[PUBLIC])
        return {
            **parameters,
            BIAS: grown_biases(parameters[BIAS], len(public)),
            PUBLIC: public,
            LEARNED: F.pad(parameters[LEARNED], (0, 0, 0, more)),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Log popularities personalised by the user's fitted taste, up to a constant, `[C, B,
        items]`."""
        return self.scorer(parameters)(histories)

    def scorer(self, parameters: Parameters) -> Callable[[Tensor], Tensor]:
        """Return a scorer, see `HistoryModel.scorer`; the embeddings are decomposed first."""
        slices = zip(*(parameters[name] for name in (BIAS, PUBLIC, LEARNED)), strict=True)
        fitted = [
            LogLinear(torch.cat([public, learned], 1), bias[:, 0])
            for bias, public, learned in slices
        ]

        def of(histories: Tensor) -> Tensor:
            exported = torch.compiler.is_compiling()
            scores = LogLinear.traced_scores if exported else LogLinear.scores
            pairs = zip(fitted, histories, strict=True)
            return torch.stack([scores(model, history) for model, history in pairs])

        return of


# A linear item-to-item model: a user's score of an item is the sum of its weights to the items that
# the user likes (SLIM, Ning and Karypis 2011; EASE, Steck 2019).
#
# It has no user parameters and needs no features, so it can score any user with a history. Only the
# `items` most popular items, by the items' biases, have weights; all others are ranked below these,
# by their biases. Before any item has weights, all are ranked by their biases.
#
#     s_uj = sum over i in the history of u of x_ui B_ij
#
# with x_ui = 1 for liked items and `low-rated` for other rated ones.
#
# With step and strategy `gram` the weights are found in one round.


class ItemWeightsConfig(_ProductsConfig, LowRatedConfig):
    """Settings of the linear item-to-item model; its `items` are those with weights."""


class ItemWeights(ProductsModel):
    """Linear item-to-item model: biases and weights."""

    name = "item-weights"
    Config = ItemWeightsConfig
    paper = "SLIM (Ning and Karypis 2011), EASE (Steck 2019)"
    config: ItemWeightsConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise zero biases and weights, without randomness."""
        return {
            BIAS: torch.zeros(self.schema.num_items, 1),
            WEIGHTS: torch.zeros(self.size, self.size),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`; the biases for users without a known item
        with weights."""
        slices = zip(parameters[BIAS], parameters[WEIGHTS], histories, strict=True)
        return torch.stack([self._scores(bias[:, 0], *tables) for bias, *tables in slices])

    def _scores(self, bias: Tensor, weights: Tensor, histories: Tensor) -> Tensor:
        """Scores `[B, items]` of one slice's users."""
        popularity = _between(bias)
        chosen = chosen_items(bias, self.size)
        known = histories[:, chosen].to(weights.dtype)
        weighted_sums = known @ weights
        scores = weighted_sums.amin(1, keepdim=True) - 1 + popularity.expand(len(histories), -1)
        scores[:, chosen] = weighted_sums
        weighted = known.any(1, keepdim=True) & weights.any()
        return torch.where(weighted, scores, popularity)


def _between(bias: Tensor) -> Tensor:
    """Biases rescaled into [0, 1), in the same order."""
    spread = bias.max() - bias.min()
    return (bias - bias.min()) / (spread.clamp(min=1e-9) * 1.001)


# Markov chain of items: weights from a user's last items to the next one (`fedrec.sums.products`).
#
#     s_uj = sum over d = 1..window of decay^(d - 1) W_ij,  i the d-th item of u from the end
#
# As in `item-weights`, the `items` most popular items have weights, and the others are ranked below
# them by their biases. Step and strategy `transitions` find the weights in one round.


class TransitionsModelConfig(_ProductsConfig, RecencyConfig):
    """Settings of transitions; their `items` are those with weights."""


class TransitionsModel(ItemWeights):
    """Markov chain of items: weights from one item to the next."""

    name = "transitions"
    Config = TransitionsModelConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    config: TransitionsModelConfig

    def __init__(self, config: TransitionsModelConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.form = HistoryForm(recency=config)


# A linear model whose items need no interactions: factors of old ones from users, of new ones from
# their content.
#
# Scores of a user are its vector's products with the items' factors (`fedrec.sums.fold_in`).
#
#     item.bias      popularities, by which users without a known item are ranked for
#     item.public    columns of vectors and categories, which stay as they are
#     item.left      what an item adds to its user's vector
#     item.right     factors of items
#     content.map    from columns to factors, for items that come later
#     item.products  what users' products are sent as a change of; zero on the server
#
# Strategy `content-map` computes left, right and the map from the sum of the users' products.

LEFT = "item.left"
RIGHT = "item.right"
MAP = "content.map"


class ContentMapModelConfig(_ProductsConfig, LowRatedConfig):
    """Settings of the factors and of users' histories."""

    factors: Width = 64
    """Largest number of factors; as many as items with EASE's weights."""


class ContentMapModel(ProductsModel):
    """Factors of items, from users or from content."""

    name = "content-map"
    Config = ContentMapModelConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010) of PureSVD (Cremonesi et al. 2010)"
    config: ContentMapModelConfig

    @classmethod
    def features_used(cls, config: ContentMapModelConfig, known: FeatureNames) -> FeatureNames:
        """Vectors and categories of items."""
        return content_names(known)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The public columns, and zeros; nothing is drawn."""
        items = self.schema.num_items
        width = min(self.config.factors, self.size)
        public = content_columns(self.schema.item_features)
        return {
            BIAS: torch.zeros(items, 1),
            PUBLIC: public,
            LEFT: torch.zeros(items, width),
            RIGHT: torch.zeros(items, width),
            MAP: torch.zeros(public.shape[1], width),
            PRODUCTS: torch.zeros(self.size, self.size),
        }

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`; the biases for users without a known item
        that has factors."""
        tastes = histories.to(parameters[LEFT].dtype) @ parameters[LEFT]
        scores = tastes @ parameters[RIGHT].transpose(1, 2)
        known = tastes.abs().amax(2, keepdim=True) > 0
        return torch.where(known, scores, parameters[BIAS].transpose(1, 2))

    def grown(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Model.grown`: factors of the new items by the map of the run."""
        public = content_columns(self.schema.item_features)
        more = len(public) - len(parameters[PUBLIC])
        right = public[len(parameters[PUBLIC]) :] @ parameters[MAP]
        return {
            **parameters,
            BIAS: grown_biases(parameters[BIAS], len(public)),
            PUBLIC: public,
            LEFT: F.pad(parameters[LEFT], (0, 0, 0, more)),
            RIGHT: torch.cat([parameters[RIGHT], right]),
        }


# A probabilistic neighbourhood model whose similarities clients learn together (PNBM, equations 1
# to 3).
#
#     f_ui = m_i + sum_j s_ij (r_uj - m_j) / (prior + sum_j |s_ij|)
#
# with j over the items that u rated, without i.
#
# Item means, counts of ratings, and similarities between the `items` most rated items are shared. A
# user's ratings are used on its device only. Any other two items have the similarity 1.
# Initially all similarities are 1, and the prediction is the item's mean plus the user's mean
# deviation, shrunk towards 0.
#
# Where this differs from the paper: there is a `prior` in the denominator (0 in the paper, where
# the scale of S means nothing); similarities may be of low rank, S = 1 + A B^T; and the model
# is designed for noise on sums of users' updates (`clients/steps/pnbm.py`, `strategies/phases.py`).


class PnbmConfig(Config):
    """Settings of the federated neighbourhood model."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""
    items: int | None = Field(default=None, ge=2)
    """Number of items with similarities, the most rated ones by the counts of the first round;
    default: all."""
    rank: int | None = Field(default=None, ge=1)
    """Rank k of the learned similarities, S = 1 + A B^T with two tables `[items, k]`; default:
    full rank, `[items, items]`."""
    prior: float = Field(default=5.0, ge=0)
    """Constant added to denominators, like this number of additional ratings without deviation at
    similarity 1."""


class Pnbm(HistoryModel):
    """Probabilistic neighbourhood model: item means and similarities.

    Raises:
        ExperimentError: `items` exceeds the catalogue.
    """

    name = "pnbm"
    Config = PnbmConfig
    tasks = ("rating",)
    form = HistoryForm(rated=True)
    paper = "PNBM, equations 1-3"
    item_tables = ("item.mean", "item.count")
    config: PnbmConfig

    def __init__(self, config: PnbmConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        if config.items is not None and config.items > schema.num_items:
            raise ExperimentError(
                "model.items exceeds the catalogue",
                expected=f"at most {schema.num_items}",
                got=str(config.items),
                fix="leave out model.items to use all items",
            )
        self.size = schema.num_items if config.items is None else config.items

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise means in the middle of the scale, zero counts, and similarities equal or close
        to 1."""
        items = self.schema.num_items
        config = self.config
        parameters = {
            "item.mean": torch.full((items, 1), sum(config.scale) / 2),
            "item.count": torch.zeros(items, 1),
        }
        if config.rank is None:
            return {**parameters, "similarity": torch.ones(self.size, self.size)}
        drawn = torch.randn(2, self.size, config.rank, generator=generator) * INIT_STD
        return {
            **parameters,
            "similarity.left": drawn[0].clone(),
            "similarity.right": drawn[1].clone(),
        }

    def chosen(self, counts: Tensor) -> Tensor:
        """Items with similarities, `int64 [size]`, chosen by their counts `[items, 1]`; the r-th
        has row r."""
        if self.size == self.schema.num_items:
            return torch.arange(self.size, device=counts.device)
        return torch.argsort(counts[:, 0], descending=True, stable=True)[: self.size]

    def similarities(self, parameters: Parameters) -> Tensor:
        """Learned similarities, `[C, size, size]`."""
        if self.config.rank is None:
            return parameters["similarity"]
        left = parameters["similarity.left"]
        right = parameters["similarity.right"]
        return 1 + left @ right.transpose(-1, -2)

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Predicted ratings `[C, B, items]`, see `HistoryModel.history_scores`; histories contain
        ratings."""
        means = parameters["item.mean"].squeeze(-1).unsqueeze(1)
        known = (histories > 0).to(histories.dtype)
        deviations = (histories - means) * known
        above = deviations.sum(-1, keepdim=True) - deviations
        below = known.sum(-1, keepdim=True) - known
        similarities = self.similarities(parameters)
        # an item is not its own neighbour; ONNX has no diagonal to write to
        diagonal = torch.diag_embed(similarities.diagonal(dim1=-2, dim2=-1))
        similarities = similarities - diagonal + torch.eye(self.size, device=similarities.device)
        for client, counts in enumerate(parameters["item.count"]):
            chosen = self.chosen(counts)
            learned = similarities[client]
            above[client][:, chosen] += deviations[client][:, chosen] @ (learned - 1).T
            below[client][:, chosen] += known[client][:, chosen] @ (learned.abs() - 1).T
        below = self.config.prior + below
        guess = torch.where(below > 0, above / below.clamp(min=1e-12), 0.0)
        return (means + guess).clamp(*self.config.scale)
