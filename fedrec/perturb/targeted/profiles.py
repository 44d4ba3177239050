# SPDX-License-Identifier: Apache-2.0
"""All clients' profiles, perturbed: the merged data sets of the poster "targeted DP" (equation 3).

Every client is perturbed independently with its own random stream, as its device would do once
before the first round. The order of rows is kept: a row's item and rating change, its user and time
do not.
"""

from dataclasses import dataclass

import numpy as np

from fedrec.config import did_you_mean
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import TrainingData
from fedrec.errors import ExperimentError
from fedrec.perturb.targeted.config import TargetedConfig
from fedrec.perturb.targeted.guarantee import Guarantee, guarantee
from fedrec.perturb.targeted.inclination import inclination, stereotypicality
from fedrec.perturb.targeted.mechanisms import (
    Interaction,
    RandomisedRows,
    coin_flip,
    randomised_response,
)
from fedrec.perturb.targeted.selection import at_random, most_stereotypical, protected_count
from fedrec.rng import stream


@dataclass(frozen=True, eq=False)
class PerturbedProfiles:
    """Perturbed training rows.

    Attributes:
        config: the settings.
        learned: the training rows; item and rating of some differ from the real ones.
        protected: `int64 [rows]`, ascending: row numbers of the protected interactions.
        clients: `int64 [clients]`, ascending: clients with training rows.
        guarantees: one per client.
    """

    config: TargetedConfig
    learned: Interactions
    protected: np.ndarray
    clients: np.ndarray
    guarantees: tuple[Guarantee, ...]


def perturb_profiles(data: TrainingData, config: TargetedConfig, seed: int) -> PerturbedProfiles:
    """Perturb the training rows of all clients.

    Args:
        data: the training rows, and whose rows give the stereotypes. If ratings are not used, a
            replaced row keeps its rating. The rating scale is that of these rows.
        config: the settings.
        seed: of the streams `"perturb"`, one per client.

    Raises:
        ExperimentError: the attribute is unknown, or a user has several categories of it.
        DataError: a client has no unvisited item left.
    """
    interactions = data.rows
    groups, num_groups = _groups(interactions, config.attribute)
    scores = _stereotypes(data, groups, num_groups)
    work = _Perturber(data, config, seed, groups, scores)
    clients = np.flatnonzero(np.diff(interactions.user_offsets))
    guarantees = [work.perturb(client, interactions.rows_of(client)) for client in clients.tolist()]
    protected = np.flatnonzero(work.is_protected)
    return PerturbedProfiles(config, work.table(), protected, clients, tuple(guarantees))


class _Perturber(RandomisedRows):
    """Perturbs clients one by one."""

    def __init__(
        self,
        data: TrainingData,
        config: TargetedConfig,
        seed: int,
        groups: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        super().__init__(data)
        self.config = config
        self.seed = seed
        self.groups = groups
        self.scores = scores
        self.is_protected = np.zeros(len(self.items), dtype=bool)

    def perturb(self, client: int, rows: np.ndarray) -> Guarantee:
        """Perturb the rows of one client in the arrays."""
        random = stream(self.seed, "perturb", client)
        items = self.items[rows]
        chosen = rows[self._chosen(client, items, random)]
        own = np.unique(items)
        self.write(chosen, self._randomised(chosen, own, random))
        self.is_protected[chosen] = True
        sizes = {"own_items": len(own), "rows": len(rows), "protected": len(chosen)}
        return guarantee(self.config, **sizes, **self.sizes)

    def _chosen(self, client: int, items: np.ndarray, random: np.random.Generator) -> np.ndarray:
        count = protected_count(len(items), self.config.budget)
        if self.config.select == "random":
            return at_random(len(items), count, random)
        group = self.groups[client]
        scores = self.scores[group, items] if group >= 0 else np.zeros(len(items))
        return most_stereotypical(scores, count, random)

    def _randomised(
        self, rows: np.ndarray, own: np.ndarray, random: np.random.Generator
    ) -> Interaction:
        real = self.real(rows)
        given = {"epsilon": self.config.epsilon, "random": random, **self.sizes}
        if self.config.mechanism == "randomised-response":
            return randomised_response(real, **given)
        return coin_flip(real, own, **given)


def _groups(interactions: Interactions, attribute: str) -> tuple[np.ndarray, int]:
    """Each user's category `int64 [users]`, -1 for none, and the number of categories."""
    known = interactions.user_features.names
    if attribute not in known:
        raise ExperimentError(
            f"the users of {interactions.name} have no feature {attribute!r}",
            expected=f"one of {', '.join(known)}" if known else "a dataset with user features",
            got=attribute,
            fix=did_you_mean(attribute, known) if known else "choose another dataset",
        )
    feature = interactions.user_features[attribute]
    if feature.width > 1:
        raise ExperimentError(
            f"a user may have several categories of {attribute!r}",
            expected="a feature with at most one category per user",
            got=f"up to {feature.width}",
            fix="choose another perturb.attribute",
        )
    return feature.padded()[:, 0], len(feature.categories)


def _stereotypes(data: TrainingData, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """Stereotypicality `float64 [groups, items]` from the raw training rows of the training
    clients."""
    interactions = data.rows
    gives = np.zeros(interactions.num_users, dtype=bool)
    gives[data.clients] = True
    rows = np.flatnonzero(gives[interactions.users])
    # all others belong to no group, so that group sizes count training clients only
    counted = np.where(gives, groups, -1)
    shares = inclination(
        interactions.users[rows],
        interactions.items[rows],
        counted,
        num_groups=num_groups,
        num_items=interactions.num_items,
    )
    return stereotypicality(*shares)
