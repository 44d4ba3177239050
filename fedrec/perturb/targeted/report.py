# SPDX-License-Identifier: Apache-2.0
"""Statistics of a targeted perturbation over clients: its effect on the dataset and its
guarantee."""

from typing import Any

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.perturb.targeted.profiles import PerturbedProfiles


def summary(real: Interactions, perturbed: PerturbedProfiles) -> dict[str, Any]:
    """Figures.

    Args:
        real: the training rows before.
        perturbed: the same after.

    Returns:
        `protected`, the number of protected rows; `changed`, the share of these with another item;
        `epsilon`, the smallest, median and largest value over clients of each kind of guarantee,
        and the nominal one summed over a client's protected interactions.
    """
    places = perturbed.protected
    learned = perturbed.learned
    counts = np.bincount(real.users[places], minlength=real.num_users)[perturbed.clients]
    epsilons = {
        "nominal, one interaction": [one.nominal for one in perturbed.guarantees],
        "nominal, all protected": (counts * perturbed.config.epsilon).tolist(),
        "true, log odds of a real interaction": [one.odds for one in perturbed.guarantees],
        "true, one slot": [one.slot for one in perturbed.guarantees],
        "true, profile, one item exchanged": [one.item for one in perturbed.guarantees],
        "true, whole profile": [one.profile for one in perturbed.guarantees],
    }
    return {
        "protected": len(places),
        "changed": float((real.items[places] != learned.items[places]).mean())
        if len(places)
        else 0.0,
        "epsilon": {name: _spread(values) for name, values in epsilons.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)  # no interpolation between finite and infinite values
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
