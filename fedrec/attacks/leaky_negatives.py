# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run whose clients' negatives reveal the held-out items.

The leak needs no model: an item that a user never draws as a negative, and that is not a training
positive, is a held-out one. If items are ranked by how rarely they were drawn, held-out items are
first after some rounds.
"""

from __future__ import annotations

from fedrec.experiment.schema import Experiment


def leaks(experiment: Experiment) -> bool:
    """Whether held-out items are kept out of the clients' negatives."""
    return bool(experiment.split.options.get("leaky-negatives", False))


def marked(experiment: Experiment) -> str:
    """The experiment's name in tables."""
    return f"{experiment.name} [leak]" if leaks(experiment) else experiment.name


def leak_words(experiment: Experiment) -> list[str]:
    """Remarks on the leak for a result, one paragraph each; none without a leak."""
    if not leaks(experiment):
        return []
    return [
        "LEAK: split.leaky-negatives kept held-out items out of the negatives that clients learn"
        " from, so that they can be identified without a model. These figures say"
        " nothing of how well the system recommends."
    ]
