# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a federated recommender without and with differential privacy, and a report of
both.

Both runs are of the linear item-to-item model on synthetic data: one without privacy beside
popularity and centralised EASE, one at epsilon 5 for each user beside private popularity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedrec.report.page.page import report
from fedrec.runs.result import Result
from fedrec.runtime.atomic_files import write_atomically
from server.callbacks.base import Callback
from simulations.runner import run

EXPERIMENTS = ("linear-synthetic", "linear-private-synthetic")


def demo(
    output: Path,
    *,
    callbacks: Callable[[], Sequence[Callback]] = list,
    overrides: Sequence[str] = (),
    show: Callable[[Result], None] = lambda result: None,
) -> Path:
    """Run both experiments and write the report.

    Args:
        output: a folder; each run gets a folder below it.
        callbacks: makes those of a run.
        overrides: texts such as `"dataset.users=400"`, for both.
        show: called with each result.

    Returns:
        The page, `report.html` in `output`.

    Raises:
        RunError: there are runs in `output` already.
    """
    results = []
    for name in EXPERIMENTS:
        results.append(run(name, overrides, output=output / name, callbacks=callbacks()))
        show(results[-1])
    page = output / "report.html"
    title = "A federated recommender, with and without differential privacy"
    write_atomically(page, report(results, title=title))
    return page
