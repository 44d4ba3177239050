# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run on simulated devices, and the simulated hours that it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from simulations.study.runs import finished, measure
from simulations.study.study import Found, TaskJob


def beside_hours(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of one run, see `simulations.study.runs.measure`, and its simulated hours."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    seconds = finished(job, experiment, set).rounds["simulated-seconds"].iloc[-1]
    yield Found(dataset, row, "simulated hours", float(seconds) / 3600)
