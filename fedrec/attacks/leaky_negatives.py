# SPDX-License-Identifier: Apache-2.0
"""How a run says that its clients' negatives give away what is held out.

Without any model: an item that its user never drew as a negative, and that is no training positive,
is a held-out one. Ranked by how seldom they were drawn, held-out items come first after some rounds
(`never_drawn_scores`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedrec.experiment.schema import Experiment


def leaks(experiment: Experiment) -> bool:
    """Whether held-out items are kept out of the clients' negatives."""
    return bool(experiment.split.options.get("leaky-negatives", False))


def marked(experiment: Experiment) -> str:
    """The experiment's name as a table shows it."""
    return f"{experiment.name} [leak]" if leaks(experiment) else experiment.name


def leak_words(experiment: Experiment) -> list[str]:
    """What a result says of it, one paragraph each; nothing where there is no leak."""
    if not leaks(experiment):
        return []
    return [
        "LEAK: split.leaky-negatives kept held-out items out of the negatives that clients learn"
        " from, so that they can be told from all other items without a model. These figures say"
        " nothing of how well the system recommends."
    ]


def never_drawn_scores(draws: Iterable[np.ndarray], num_items: int) -> np.ndarray:
    """Scores `float64 [items]` of one user that use no model: minus how often each item was drawn
    as a negative.

    Args:
        draws: items `int64` of each round's negatives.
        num_items: size of the catalogue.
    """
    counts = np.zeros(num_items)
    for drawn in draws:
        counts += np.bincount(drawn, minlength=num_items)
    return -counts
