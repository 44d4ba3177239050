# SPDX-License-Identifier: Apache-2.0
"""True and requested epsilons of users who add their own noise, as a table and as sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedrec.privacy.accounting.gdp import gdp_epsilon
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.personal.noise import PAPER_MODE, PersonalNoise
from fedrec.runtime.strict_json import finite

if TYPE_CHECKING:
    import pandas as pd

KINDS: tuple[Adjacency, ...] = ("add-remove", "replace-one")
_COLUMNS = ("uploads", "nominal", *KINDS)
_SHOWN = (0, 10, 50, 90, 100)  # percentiles


def epsilon_table(
    settings: PersonalNoise, clients: Sequence[int], asked: Sequence[int]
) -> pd.DataFrame:
    """One row per client.

    Args:
        settings: the users' noise.
        clients: their ids.
        asked: number of rounds in which each was drawn; a device makes no more uploads than
            planned.

    Returns:
        Indexed by client: `uploads`; `nominal`, the epsilon asked for; `add-remove` and
        `replace-one`, the true epsilon of all releases at the configured delta if all data of the
        user may be removed or replaced; infinite with mode `paper` for all users with uploads,
        because the clip norm is computed from private data.
    """
    import pandas as pd

    limit = math.inf if settings.participations is None else settings.participations
    uploads = [int(min(number, limit)) for number in asked]
    frame = pd.DataFrame({"uploads": uploads}, index=pd.Index(list(clients), name="client"))
    frame["nominal"] = [settings.budget(client).epsilon for client in clients]
    for adjacency in KINDS:
        costs = [
            settings.cost(client, adjacency, number)
            for client, number in zip(clients, uploads, strict=True)
        ]
        frame[adjacency] = [_epsilon(cost, settings.delta) for cost in costs]
    return frame


def promises(settings: PersonalNoise) -> list[str]:
    """Remarks to print before the run."""
    said = []
    if settings.mode == "paper":
        said.append(f"Mode 'paper': {PAPER_MODE}.")
    elif settings.participations is None:
        said.append(
            "Noise is set for one upload alone, as in the paper: each further upload costs again."
        )
    if settings.noise != "secure":
        said.append(
            f"Users' noise is {settings.noise!r}: a simulation, not a release; noise can be"
            " computed from the seed."
        )
    return said


def words(settings: PersonalNoise, table: pd.DataFrame) -> list[str]:
    """The table as sentences."""
    uploads, nominal, nothing, exchanged = (table[name].to_numpy(dtype=float) for name in _COLUMNS)
    said = promises(settings)
    said.append(
        f"Epsilon asked for by {len(table)} users, {_spread(nominal)}; true epsilon of all their"
        f" uploads ({uploads.min():.0f} to {uploads.max():.0f} each) at delta {settings.delta:.3g},"
        f" all data of a user exchanged: {_spread(exchanged)}; put to nothing: {_spread(nothing)}."
    )
    over = int((exchanged > nominal * (1 + 1e-6)).sum())
    said.append(
        f"{over} of {len(table)} users spent more than they asked for. epsilons.csv has one row per"
        " user."
    )
    if settings.priors is not None:
        put = (
            "noise, which is counted"
            if settings.priors.noise
            else "no noise and stay on the device"
        )
        said.append(f"Priors from users' metadata ({settings.priors.source}) have {put}.")
    return said


def summary(table: pd.DataFrame) -> dict[str, dict[str, float | str]]:
    """Percentiles of each column as JSON values; an infinite one is the text "inf"."""
    found = {}
    for column in _COLUMNS:
        values = _percentiles(table[column].to_numpy(dtype=float))
        found[column] = {
            f"p{place}": finite(value) for place, value in zip(_SHOWN, values, strict=True)
        }
    return found


def _epsilon(cost: float, delta: float) -> float:
    return gdp_epsilon(math.sqrt(cost), delta) if math.isfinite(cost) else math.inf


def _percentiles(values: np.ndarray) -> list[float]:
    ordered = np.sort(values)  # np.percentile makes NaN out of two infinities
    return [float(ordered[round(place / 100 * (len(ordered) - 1))]) for place in _SHOWN]


def _spread(values: np.ndarray) -> str:
    named = zip(("least", "10%", "median", "90%", "most"), _percentiles(values), strict=True)
    return ", ".join(f"{name} {value:.3g}" for name, value in named)
