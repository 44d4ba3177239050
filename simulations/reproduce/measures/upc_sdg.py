# SPDX-License-Identifier: Apache-2.0
"""How alike UPC-SDG's substitutes are to the rows that they replace (figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrec.data.population import Population
from fedrec.perturb.mean_similarity import FIGURE
from simulations.study.study import Found, TaskJob


def similarity(
    job: TaskJob, dataset: str, experiment: Mapping[str, Any], row: str, set: Sequence[str]
) -> list[Found]:
    """Mean similarity, as in the paper's definition 2."""
    perturbed = Population.of(job.experiment({**experiment, "rounds": 1}, set)).perturbed
    by_gamma = {} if perturbed is None else perturbed.figures[FIGURE]
    return [Found(dataset, row, "similarity", one["paper"]) for one in by_gamma.values()]
