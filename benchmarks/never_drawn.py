# SPDX-License-Identifier: Apache-2.0
"""The list that uses no model (`simulations/bench/probe.py`) beside each run of
`benchmarks/peers.toml`, without and with the leak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from simulations.reproduce.bench import never_drawn
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import measure


def beside(
    job: TaskJob,
    experiment: str,
    dataset: str,
    row: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of a run, and those of the list without a model."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    for file in job.run_path.glob("private/*"):
        file.unlink()  # as large as the catalogue times the users; nothing resumes it
    found = never_drawn(job.experiment(experiment, set))
    for ours, theirs in metrics.items():
        yield Found(dataset, f"no model, draws of {row}", theirs, float(np.nanmean(found[ours])))
