# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run, and a figure of its rounds beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import finished, measure


def _upload(rounds: pd.DataFrame) -> float:
    """Kilobytes that a client sends in a round."""
    sent = np.sum(rounds["bytes-up"].to_numpy()) / np.sum(rounds["num-clients"].to_numpy())
    return float(sent) / 1000


def _hours(rounds: pd.DataFrame) -> float:
    """Simulated hours of the whole run."""
    return float(rounds["simulated-seconds"].iloc[-1]) / 3600


FIGURES = {"kB per upload": _upload, "simulated hours": _hours}


def beside(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    figure: str,
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of one run, see `simulations.studies.runs.measure`, and one of `FIGURES`."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    yield Found(dataset, row, figure, FIGURES[figure](finished(job, experiment, set).rounds))
