# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run with compressed updates, and the bytes that a client sends in a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from simulations.study.runs import finished, measure
from simulations.study.study import Found, TaskJob


def beside_bytes(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of one run, see `simulations.study.runs.measure`, and what a client sends."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    rounds = finished(job, experiment, set).rounds
    sent = np.sum(rounds["bytes-up"].to_numpy()) / np.sum(rounds["num-clients"].to_numpy())
    yield Found(dataset, row, "kB per upload", float(sent) / 1000)
