# SPDX-License-Identifier: Apache-2.0
"""The local differential privacy of a perturbation: the nominal epsilon and the true ones.

Equation 2 of the poster "targeted DP" keeps an interaction with odds of e^eps to 1, but spreads the
other outcome over the m unvisited items (times R rating values, if ratings are drawn too). A real
interaction is therefore m R e^eps times as likely to be published as a given fake one, and a fake
is never an item that the user has. With k protected interactions, the smallest epsilon that holds
is

    one slot, another item instead     eps + ln m; infinite if ratings are drawn, as the neighbour
                                       cannot publish its own item with another rating, but a fake
                                       can have any rating
    the merged profile, one slot       the same
    the merged profile, several slots  infinite: two equal fakes, or two fakes, can be impossible
                                       for a neighbour
    beta > 0                           infinite: unprotected interactions are published unchanged

Randomised response over the whole catalogue gives eps per slot and k eps per profile. Each line is
checked by enumeration of small catalogues in `tests/fedrec/perturb/test_guarantee.py`. "Merged
profile" means the set that is published, without the order of its rows; neighbours have equally
many interactions, all of different items.
"""

import math
from dataclasses import dataclass

from fedrec.perturb.targeted.config import TargetedConfig


@dataclass(frozen=True)
class Guarantee:
    """Epsilons for one client, each the smallest that holds (delta = 0).

    Attributes:
        nominal: epsilon setting of the mechanism.
        odds: log of the ratio of the probabilities of publishing an interaction if it is real and
            as a given fake.
        slot: one protected interaction alone, replaced by one with another item.
        item: the merged profile, when one interaction of it is exchanged.
        profile: the merged profile, when all of it is exchanged.
    """

    nominal: float
    odds: float
    slot: float
    item: float
    profile: float


def guarantee(
    config: TargetedConfig,
    *,
    num_items: int,
    own_items: int,
    rows: int,
    protected: int,
    num_values: int = 1,
) -> Guarantee:
    """The epsilons of one client.

    Args:
        config: the settings.
        num_items: size of the catalogue.
        own_items: number of distinct items of the client.
        rows: number of its training rows.
        protected: how many of them are protected, in `[0, rows]`.
        num_values: number of rating values; 1 if ratings are not used.
    """
    epsilon = config.epsilon
    whole = protected == rows
    if config.mechanism == "randomised-response":
        profile = protected * epsilon if whole else math.inf
        return Guarantee(epsilon, epsilon, epsilon, epsilon if whole else math.inf, profile)
    unvisited = num_items - own_items
    odds = epsilon + math.log(unvisited * num_values) if unvisited else math.inf
    slot = odds if num_values == 1 else math.inf
    if protected == 1 and whole:
        return Guarantee(epsilon, odds, slot, slot, slot)
    return Guarantee(epsilon, odds, slot, math.inf, math.inf)


def words(config: TargetedConfig) -> list[str]:
    """Sentences to be reported with the results of a run."""
    said = [
        (
            f"Perturbation on the device ({config.mechanism}, {config.select} selection, budget"
            f" {config.budget:g}) with nominal epsilon {config.epsilon:g} per protected"
            " interaction; it adds up over a profile's interactions."
        ),
    ]
    if config.mechanism == "coin-flip":
        said.append(
            "The coin flip truly gives epsilon + ln m for one protected interaction, with m items"
            " that the client has not, no finite epsilon where a fake's rating is drawn too, and in"
            " general none for a profile of two or more interactions. perturb.mechanism ="
            " 'randomised-response' truly gives its epsilon for each protected interaction, and"
            " leaves far fewer of them as they were."
        )
    if config.budget > 0:
        said.append(
            "The untouched share of each profile is published as it is: no epsilon covers a whole"
            " profile."
        )
    if config.select == "stereotypical":
        said.append(
            "Items' stereotypes come from everyone's raw data and attributes; no epsilon covers"
            " that."
        )
    said.append("Random numbers come from the experiment's seed: a simulation, not a release.")
    return said
