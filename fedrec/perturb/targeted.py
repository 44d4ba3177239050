# SPDX-License-Identifier: Apache-2.0
"""Perturbation of single rows on the device: targeted, after the poster "targeted DP" (selection,
mechanisms, guarantee and report), and randomised response."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedrec.config import Config, did_you_mean
from fedrec.data.client_data import nth_outside
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.errors import DataError, ExperimentError
from fedrec.rng import stream

# Randomising single interactions: the coin flip of the poster "targeted DP" (equation 2).
#
# An interaction is an item and, where ratings are learned from, one of the dataset's rating values.
#
# Where this differs from the paper: "unvisited" is judged by the client's training rows. Fakes that
# also avoided the held-out items would reveal them.

_RATING_SCALE = "the rating values of all clients' rows, from which replaced ratings are drawn"
"""Dependence of rated profiles on data of other clients."""


class _RandomisedRows:
    """Training rows of which some are replaced; each keeps its user and time.

    An interaction is coded as `item * num_values + value`, where `value` is an index in the list of
    the dataset's rating values; there is one value, 0, if ratings are not used.

    Args:
        data: the rows, and whether ratings are used in training; otherwise a row keeps its rating.

    Attributes:
        items: `int64 [rows]`.
        sizes: sizes of the catalogue and of the rating scale, as the mechanisms take them.
    """

    def __init__(self, data: TrainingData) -> None:
        rows = data.rows
        self._rows = rows
        self.items = rows.items.copy()
        self._ratings = None if rows.ratings is None else rows.ratings.copy()
        self._scale = np.zeros(1, np.float32)
        if data.rated and rows.ratings is not None:
            self._scale = np.unique(rows.ratings)
        self._rated = data.rated
        self.sizes = {"num_items": rows.num_items, "num_values": len(self._scale)}

    def codes(self, rows: np.ndarray) -> np.ndarray:
        """Codes of the interactions in some rows `int64 [k]`, `int64 [k]`."""
        codes = self.items[rows] * len(self._scale)
        if self._rated and self._ratings is not None:
            codes = codes + np.searchsorted(self._scale, self._ratings[rows])
        return codes

    def write(self, rows: np.ndarray, codes: np.ndarray) -> None:
        """Replace the interactions in some rows, `int64 [k]` each."""
        items, values = np.divmod(codes, len(self._scale))
        self.items[rows] = items
        if self._rated and self._ratings is not None:
            self._ratings[rows] = self._scale[values]

    def table(self) -> Interactions:
        """Return all rows in their current state."""
        return dataclasses.replace(self._rows, items=self.items, ratings=self._ratings)


def _keep_probability(epsilon: float, outcomes: int = 2) -> float:
    """Probability that an interaction is unchanged: `e^eps / (e^eps + outcomes - 1)`."""
    return 1 / (1 + (outcomes - 1) * math.exp(-epsilon))


def _coin_flip(
    codes: np.ndarray,
    visited: np.ndarray,
    *,
    num_items: int,
    num_values: int,
    epsilon: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Apply equation 2: each interaction stays with probability `e^eps / (e^eps + 1)`, or gets an
    unvisited item.

    Args:
        codes: `int64 [k]`, the protected interactions, see `_RandomisedRows`.
        visited: `int64 [items]`, ascending, distinct: all items of the client's training rows.
        num_items: size of the catalogue.
        num_values: number of rating values; a replacement's rating is drawn uniformly among them.
        epsilon: nominal epsilon, > 0.
        random: source of randomness.

    Raises:
        DataError: there is no unvisited item.
    """
    count = len(codes)
    free = num_items - len(visited)
    if count and free < 1:
        raise DataError(
            "a client has no unvisited items",
            expected="at least one item that it does not have",
            got=f"{free} of {num_items}",
            fix="set perturb.name = 'randomised-response'",
        )
    # Fakes are drawn for all interactions, so that later draws do not depend on the number of
    # flips.
    fakes = nth_outside(visited, random.integers(0, free, size=count)) * num_values
    if num_values > 1:
        fakes = fakes + random.integers(0, num_values, size=count)
    return np.where(random.random(count) < _keep_probability(epsilon), codes, fakes)


# Items that are typical of a group of users: item-group inclination and stereotypicality (poster
# "targeted DP", equation 1).
#
#     IGI(i, a) = share of the users of group a that interacted with item i
#     S(i, a)   = (IGI(i, a) - IGI(i, not a)) / max(IGI(i, a), IGI(i, not a))
#
# Where this differs from the paper:
#
# - The poster names the inclination by reference (Escobedo et al. 2024) and does not define it. A
#   share of users, unlike a number of interactions, does not depend on how large or how active a
#   group is.
# - The poster's sign `I_a(u)` is for two groups. If S is that of the user's own group, the formula
#   applies to any number of groups; for two groups `S(i, a) = -S(i, not a)`, which gives that sign.
# - An item without users has value 0, where the formula divides by zero.


def _inclination(
    users: np.ndarray, items: np.ndarray, groups: np.ndarray, *, num_groups: int, num_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the item-group inclination of every group and of its complement.

    Args:
        users: `int64 [rows]`, indices in `groups`.
        items: `int64 [rows]`; a pair that occurs twice counts once.
        groups: `int64 [users]`, each user's group, -1 for none. A user without a group is in no
            complement either.
        num_groups: number of groups.
        num_items: size of the catalogue.

    Returns:
        `float64 [groups, items]` twice, in [0, 1]; 0 for a group (or a complement) without users.
    """
    pairs = np.unique(users * num_items + items)
    group = groups[pairs // num_items]
    item = pairs % num_items
    has_group = group >= 0
    having = np.zeros((num_groups, num_items))
    np.add.at(having, (group[has_group], item[has_group]), 1.0)
    sizes = np.bincount(groups[groups >= 0], minlength=num_groups).astype(np.float64)[:, None]
    inside = having / np.maximum(sizes, 1)
    outside = (having.sum(axis=0) - having) / np.maximum(sizes.sum() - sizes, 1)
    return inside, outside


def _stereotypicality(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Compute the stereotypicality of each item for each group, from -1 (only others have it) to 1
    (only the group has it).

    Args:
        inside: `float64 [groups, items]`, inclination of each group.
        outside: `float64 [groups, items]`, inclination of its complement.
    """
    larger = np.maximum(inside, outside)
    return np.divide(inside - outside, larger, out=np.zeros_like(larger), where=larger > 0)


# Selection of the protected interactions of a profile by the data budget (poster "targeted DP",
# section 2).
#
# The poster's argmax means the k largest values. Ties are broken at random, independently of the
# order of a dataset's rows.


def _protected_count(rows: int, budget: float) -> int:
    """Number of protected rows, `ceil((1 - beta) rows)`, in decimal arithmetic: 10 rows and .7 give
    3, although 1 - .7 > .3 in floats."""
    return math.ceil((1 - Fraction(str(budget))) * rows)


def _most_stereotypical(scores: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Positions of the highest scores `float [rows]`, `int64 [count]`, ascending."""
    order = np.lexsort((random.random(len(scores)), -scores))
    return np.sort(order[:count])


# Settings of the targeted perturbation.


class TargetedConfig(Config):
    """Settings of the perturbation of each client's rows on its device, drawn once for all rounds.
    A draw per round would publish a profile as often as its client is sampled.
    """

    attribute: str
    """The attribute to hide: name of a user feature with at most one category per user, such as
    `gender`."""
    epsilon: float = Field(gt=0)
    """Nominal epsilon of one protected interaction; `fedrec perturb` reports the true guarantee."""
    budget: float = Field(default=0.0, ge=0, le=1)
    """Data budget beta: the share of a profile that is not perturbed."""
    select: Literal["stereotypical", "random"] = "stereotypical"
    """Protected interactions: the most stereotypical ones of the profile (equation 1), or random
    ones."""


# The local differential privacy of a perturbation: the nominal epsilon and the true ones.
#
# Equation 2 of the poster "targeted DP" keeps an interaction with odds of e^eps to 1, but spreads
# the other outcome over the m unvisited items (times R rating values, if ratings are drawn too). A
# real interaction is therefore m R e^eps times as likely to be published as a given fake one, and a
# fake is never an item that the user has. With k protected interactions, the smallest epsilon that
# holds is
#
#     one slot, another item instead     eps + ln m; infinite if ratings are drawn, as the neighbour
#                                        cannot publish its own item with another rating, but a fake
#                                        can have any rating
#     the merged profile, one slot       the same
#     the merged profile, several slots  infinite: two equal fakes, or two fakes, can be impossible
#                                        for a neighbour
#     beta > 0                           infinite: unprotected interactions are published unchanged
#
# Each line is checked by enumeration of small catalogues in
# `tests/fedrec/perturb/test_targeted.py`. "Merged profile" means the set that is published, without
# the order of its rows; neighbours have equally many interactions, all of different items.
# Randomised response over the whole catalogue gives eps per slot and k eps per profile.


def _guarantee(
    config: TargetedConfig,
    *,
    num_items: int,
    own_items: int,
    rows: int,
    protected: int,
    num_values: int = 1,
) -> dict[str, float]:
    """Compute the smallest epsilons that hold for one client (delta = 0), by their titles in
    reports: those of the setting, the log of the ratio of the probabilities of publishing an
    interaction if it is real and as a given fake one, of one protected interaction alone that is
    replaced by one with another item, and of the merged profile when one interaction or all of it
    is exchanged.

    Args:
        config: the settings.
        num_items: size of the catalogue.
        own_items: number of distinct items of the client.
        rows: number of its training rows.
        protected: how many of them are protected, in `[0, rows]`.
        num_values: number of rating values; 1 if ratings are not used.
    """
    epsilon = config.epsilon
    unvisited = num_items - own_items
    odds = epsilon + math.log(unvisited * num_values) if unvisited else math.inf
    slot = odds if num_values == 1 else math.inf
    profile = slot if protected == rows == 1 else math.inf
    return {
        "nominal, one interaction": epsilon,
        "nominal, all protected": protected * epsilon,
        "true, log odds of a real interaction": odds,
        "true, one slot": slot,
        "true, profile, one item exchanged": profile,
        "true, whole profile": profile,
    }


# Perturbed profiles of all clients: the merged data sets of the poster "targeted DP" (equation 3).
#
# Every client is perturbed independently with its own random stream, as its device would do once
# before the first round. A row's item and rating change; its user, time and position do not.


def _perturb_profiles(
    data: TrainingData, config: TargetedConfig, seed: int
) -> tuple[Interactions, np.ndarray, dict[int, dict[str, float]]]:
    """Perturb the training rows of all clients.

    Args:
        data: the training rows, and the clients whose rows define the stereotypes. If ratings are
            not used, a replaced row keeps its rating. The rating scale is that of these rows.
        config: the settings.
        seed: of the streams `"perturb"`, one per client.

    Returns:
        The training rows, of which some have another item and rating; `int64 [rows]`, ascending,
        the row numbers of the protected interactions; and the guarantee of each client with
        training rows.

    Raises:
        ExperimentError: the attribute is unknown, or a user has several categories of it.
        DataError: a client has no unvisited item left.
    """
    rows = _RandomisedRows(data)
    groups, num_groups = _groups(data.rows, config.attribute)
    scores = _stereotypes(data, groups, num_groups)
    chosen = []
    guarantees = {}
    for client in np.flatnonzero(np.diff(data.rows.user_offsets)).tolist():
        random = stream(seed, "perturb", client)
        profile = data.rows.rows_of(client)
        items = rows.items[profile]
        count = _protected_count(len(items), config.budget)
        if config.select == "random":
            protected = np.sort(random.choice(len(items), size=count, replace=False))
        else:
            group = groups[client]
            typical = scores[group, items] if group >= 0 else np.zeros(len(items))
            protected = _most_stereotypical(typical, count, random)
        visited = np.unique(items)
        codes = rows.codes(profile[protected])
        codes = _coin_flip(codes, visited, epsilon=config.epsilon, random=random, **rows.sizes)
        rows.write(profile[protected], codes)
        chosen.append(profile[protected])
        sizes = {"own_items": len(visited), "rows": len(items), "protected": count}
        guarantees[client] = _guarantee(config, **sizes, **rows.sizes)
    protected = np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))
    return rows.table(), protected, guarantees


def _groups(interactions: Interactions, attribute: str) -> tuple[np.ndarray, int]:
    """Category of each user `int64 [users]`, -1 for none, and the number of categories."""
    names = interactions.user_features.names
    if attribute not in names:
        raise ExperimentError(
            f"unknown user feature {attribute!r} of {interactions.name}",
            expected=f"one of {', '.join(names)}" if names else "a dataset with user features",
            got=attribute,
            fix=did_you_mean(attribute, names) if names else "choose another dataset",
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
    # other users belong to no group, so that group sizes count training clients only
    counted = np.where(gives, groups, -1)
    shares = _inclination(
        interactions.users[rows],
        interactions.items[rows],
        counted,
        num_groups=num_groups,
        num_items=interactions.num_items,
    )
    return _stereotypicality(*shares)


# Statistics of a targeted perturbation over clients: its effect on the dataset and its guarantee.


def _summary(changed: np.ndarray, guarantees: Collection[Mapping[str, float]]) -> dict[str, Any]:
    """Summarise a targeted perturbation for reports.

    Args:
        changed: `bool [protected]`, whether a protected row has another item.
        guarantees: of the clients.

    Returns:
        `protected`, the number of protected rows; `changed`, the share of these with another item;
        `epsilon`, the smallest, median and largest value over clients of each kind of guarantee.
    """
    epsilons = {
        title: sorted(each[title] for each in guarantees) for title in next(iter(guarantees), ())
    }
    return {
        "protected": len(changed),
        "changed": float(changed.mean()) if len(changed) else 0.0,
        "epsilon": {  # the median without interpolation between finite and infinite values
            title: {"min": values[0], "median": values[len(values) // 2], "max": values[-1]}
            for title, values in epsilons.items()
        },
    }


class Targeted(Perturbation):
    """Randomises the most stereotypical interactions of each profile, or random ones, on the
    client's device."""

    name = "targeted"
    Config = TargetedConfig
    paper = 'poster "targeted DP", equations 1 to 3'
    config: TargetedConfig

    def depends_on(self, rated: bool) -> str:
        """Describe the dependence on stereotypes of all clients' rows and on the rating scale."""
        if self.config.select == "stereotypical":
            return "stereotypes from all clients' rows (perturb.select = 'stereotypical')"
        return _RATING_SCALE if rated else ""

    def perturb(self, data: TrainingData) -> Perturbed:
        rows, protected, guarantees = _perturb_profiles(data, self.config, self.seed)
        changed = data.rows.items[protected] != rows.items[protected]
        figures = _summary(changed, guarantees.values())
        return Perturbed(rows, np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """Describe nominal and true epsilons, in sentences."""
        config = self.config
        texts = [
            f"Perturbation on the device (coin-flip, {config.select} selection, budget"
            f" {config.budget:g}) with nominal epsilon {config.epsilon:g} per protected"
            " interaction; it adds up over a profile's interactions.",
            "The true epsilon of the coin flip is epsilon + ln m for one protected interaction,"
            " with m items that the client does not have, and infinite if a fake's rating is drawn"
            " too or, in general, for a profile of two or more interactions. perturb.name ="
            " 'randomised-response' has its true epsilon for each interaction, and leaves far fewer"
            " of them unchanged.",
        ]
        if config.budget > 0:
            texts.append(
                "The unprotected share of each profile is published unchanged: no epsilon covers a"
                " whole profile."
            )
        if config.select == "stereotypical":
            texts.append(
                "Items' stereotypes come from the raw data and attributes of all clients, which no"
                " epsilon covers."
            )
        texts.append("Random numbers come from the experiment's seed: a simulation, not a release.")
        return texts


# k-ary randomised response over the catalogue, row by row (Warner 1965; Kairouz et al. 2016).


def _randomised_response(
    codes: np.ndarray,
    *,
    num_items: int,
    num_values: int,
    epsilon: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Apply randomised response over all `num_items x num_values` interactions (Warner 1965;
    Kairouz et al. 2016).

    Each stays unchanged with probability `e^eps / (e^eps + outcomes - 1)` and otherwise becomes any
    other interaction, including those of the client: exactly epsilon-DP for each interaction.

    Args:
        codes: `int64 [k]`, the protected interactions, see `_RandomisedRows`.
        num_items: size of the catalogue.
        num_values: number of rating values.
        epsilon: of one interaction, > 0.
        random: source of randomness.
    """
    outcomes = num_items * num_values
    if outcomes == 1:
        return codes
    fakes = (codes + random.integers(1, outcomes, size=len(codes))) % outcomes
    return np.where(random.random(len(codes)) < _keep_probability(epsilon, outcomes), codes, fakes)


class RandomisedResponseConfig(Config):
    """Settings of randomised response."""

    epsilon: float = Field(gt=0)
    """Epsilon of one row, > 0; a profile of n rows has n times this epsilon."""


class RandomisedResponse(Perturbation):
    """Each row keeps its item with probability e^eps / (e^eps + M - 1), or gets any other item of
    the catalogue's M."""

    name = "randomised-response"
    Config = RandomisedResponseConfig
    paper = "Warner 1965; Kairouz et al. 2016"
    config: RandomisedResponseConfig

    def depends_on(self, rated: bool) -> str:
        """Describe the dependence: if ratings are drawn too, on the rating scale."""
        return _RATING_SCALE if rated else ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Randomise every row; it keeps its user and time. If ratings are used in training, its
        rating is drawn too."""
        rows = data.rows
        randomised = _RandomisedRows(data)
        epsilon = self.config.epsilon
        outcomes = math.prod(randomised.sizes.values())
        for user in np.flatnonzero(np.diff(rows.user_offsets)).tolist():
            profile = rows.rows_of(user)
            random = stream(self.seed, "perturb", user)
            codes = _randomised_response(
                randomised.codes(profile), epsilon=epsilon, random=random, **randomised.sizes
            )
            randomised.write(profile, codes)
        figures = {
            "chance that a row stays": _keep_probability(epsilon, outcomes),
            "replaced rows": int((randomised.items != rows.items).sum()),
        }
        return Perturbed(randomised.table(), np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """Describe the guarantee of a row, and its sum over rows."""
        return [
            (
                f"Randomised response with epsilon {self.config.epsilon:g} for each row, delta 0,"
                f" on the device; a profile of n rows has {self.config.epsilon:g} n, and how many"
                " rows a user has is published."
            ),
            "Random numbers come from the experiment's seed: a simulation, not a release.",
        ]
