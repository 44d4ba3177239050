# SPDX-License-Identifier: Apache-2.0
"""One centralised system of an experiment, without the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from simulations.study.runs import finished, values
from simulations.study.study import Found, TaskJob


def alone(
    job: TaskJob,
    experiment: str,
    label: str,
    dataset: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """Metrics of a centralised system, and its seconds of CPU."""
    loaded = job.experiment(experiment, set)
    table = loaded.table()
    settings = loaded.evaluation.baseline_settings()[label]
    named = {"name": label, **settings, "label": label}
    table["evaluation"] = {**table["evaluation"], "baselines": [named]}
    started = time.process_time()
    result = finished(job, table)
    yield from values(result, dataset, {label: label}, metrics)
    yield Found(dataset, label, "CPU s", round(time.process_time() - started, 1))
