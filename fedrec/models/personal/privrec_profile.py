# SPDX-License-Identifier: Apache-2.0
"""PrivRec's network plus an item-based score: an extension of Wang et al. 2021.

    score(u, i) = network(u, i) + s cos(e_i, p_u)

where p_u, the user's profile, is the direction of the sum of the unit embeddings of the user's
positives (`fedrec.pretext.mean_encoder`), and s is `similarity`. The second term alone is an
item-kNN on the cosines of the item embeddings, which a self-supervised stage one with
`encoder = "mean"` learns to rank by; few epochs of fine-tuning make less of these embeddings.

Step `sgd-profile` trains the network as local SGD does and takes the profile on the device, where
it stays. Without a profile, as before local training, the term is zero.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.data.features import FeatureNames
from fedrec.data.schema import Schema
from fedrec.models.base import Model, Parameters, Users
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.nn.layers import gather_rows

ITEMS = "item.id"
PROFILE = "profile"


class PrivRecProfileConfig(PrivRecConfig):
    """Settings of PrivRec's network and of the term."""

    similarity: float = Field(default=12.0, gt=0)
    """What the cosine of an item's embedding and the user's profile is multiplied by (s)."""


class PrivRecProfile(Model):
    """PrivRec's network plus the similarity of an item to the user's own items.

    Attributes:
        network: PrivRec's network, which has all parameters but the profile.
    """

    name = "privrec-profile"
    Config = PrivRecProfileConfig
    paper = "an extension of PrivRec (Wang et al. 2021)"
    config: PrivRecProfileConfig

    def __init__(self, config: PrivRecProfileConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.network = PrivRec(config, schema)
        # Of this model, not of its class
        self.item_tables = self.network.item_tables  # type: ignore[misc]

    @classmethod
    def features_used(cls, config: PrivRecProfileConfig, known: FeatureNames) -> FeatureNames:
        """Those of the network."""
        return PrivRec.features_used(config, known)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Those of PrivRec, and a profile of zeros, `[embedding]`."""
        profile = torch.zeros(self.config.embedding)
        return {**self.network.initial(generator), PROFILE: profile}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        embedded = gather_rows(parameters[ITEMS], items if rows is None else rows)
        units = F.normalize(embedded, dim=-1)
        cosines = torch.bmm(units, parameters[PROFILE].unsqueeze(-1)).squeeze(-1)
        network = self.network.predict(parameters, users, items, rows)
        return network + self.config.similarity * cosines
