# SPDX-License-Identifier: Apache-2.0
"""All studies, by paper and item."""

from __future__ import annotations

from collections.abc import Iterator

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from simulations.reproduce.papers import (
    descriptions,
    dp_vae,
    pnbm,
    privrec,
    privrec_figures,
    privrec_privacy,
    targeted_dp,
    upc_sdg,
)
from simulations.reproduce.study import Study

NOT_HERE = {
    "privrec figure1": "a diagram of the system",
    "privrec table1": "notation",
    "dp-vae figure1": "a diagram of the network",
    "dp-vae figure2": "a diagram of the system",
    "dp-vae table1": "notation",
    "dp-vae table4": "settings of the compared systems, in words",
    "dp-vae table5": "needs ML-20M and Netflix: hours of training and 25 GB of memory",
    "dp-vae table9": "needs ML-20M and Netflix",
    "targeted-dp figure1": "a diagram of the method",
    "upc-sdg figure1": "a diagram of the method",
    "upc-sdg figure3": "its user and titles are of Clothing: see benchmarks/upc_sdg_example.py",
}
"""Tables and figures that are not reproduced, with the reason."""


def studies() -> Iterator[Study]:
    """Every study, in the order of the papers."""
    yield from descriptions.privrec()
    yield from privrec.tables()
    yield from privrec_figures.figures()
    yield from privrec_privacy.figures()
    yield from descriptions.dp_vae()
    yield from dp_vae.tables()
    yield from dp_vae.figures()
    yield from targeted_dp.figures()
    yield from pnbm.figures()
    yield from descriptions.upc_sdg()
    yield from upc_sdg.tables()
    yield from upc_sdg.figures()


def find(paper: str, item: str | None) -> list[Study]:
    """The studies of a paper, or one of them.

    Raises:
        ExperimentError: there is no such paper, or no such table.
    """
    known: dict[str, list[Study]] = {}
    for study in studies():
        known.setdefault(study.paper, []).append(study)
    if paper not in known:
        raise ExperimentError(
            f"there is no paper {paper!r}",
            expected="one of " + ", ".join(known),
            got=repr(paper),
            fix=did_you_mean(paper, known),
        )
    if item is None:
        return known[paper]
    items = {study.item: study for study in known[paper]}
    wanted = item.lower().replace(" ", "")
    if wanted not in items:
        wanted = wanted.replace("-", "")  # as in figure-2
    if wanted not in items:
        why = NOT_HERE.get(f"{paper} {wanted}")
        raise ExperimentError(
            f"{paper} has no {item!r} here" + (f": {why}" if why else ""),
            expected="one of " + ", ".join(items),
            got=repr(item),
            fix=None if why else did_you_mean(wanted, items),
        )
    return [items[wanted]]
