# SPDX-License-Identifier: Apache-2.0
"""Default paths of run folders."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from fedrec.experiment.schema import Experiment


def default_folder(experiment: Experiment) -> Path:
    """Where a run goes without `--output`: `$FEDREC_RUNS` or `runs/`, by name, time and digest."""
    return runs_directory() / f"{experiment.name}-{stamp()}-{experiment.digest()[:6]}"


def stamp() -> str:
    """The present time as a part of a folder's name."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def runs_directory() -> Path:
    """Where run folders go without `--output`: `$FEDREC_RUNS`, or `runs/`."""
    return Path(os.environ.get("FEDREC_RUNS", "runs")).expanduser()
