# SPDX-License-Identifier: Apache-2.0
"""Records of a run folder other than results: ids of the data, the environment, and its default
path."""

import functools
import json
import math
import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.errors import DataError, unreadable
from fedrec.experiment.schema import Experiment
from fedrec.runtime.files import parse_json, write_atomically

# The map between the data's ids and the numbers that clients and items have in a run folder.
#
#     ids/users.txt      line n (from 0): the data's id of user n, as a JSON text
#     ids/items.txt      likewise for items


def write_ids(folder: Path, interactions: Interactions) -> None:
    """Write the ids of users and items below `folder`, once."""
    for name, ids in (("users", interactions.user_ids), ("items", interactions.item_ids)):
        file = folder / "ids" / f"{name}.txt"
        if not file.exists():
            write_atomically(file, id_lines(ids))


def id_lines(ids: np.ndarray) -> str:
    """Format ids `[n]` as the content of such a file."""
    texts = list(map(str, ids.tolist()))
    return json.dumps(texts, ensure_ascii=False, separators=("\n", ":"))[1:-1] + "\n"


def read_ids(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the ids of users and of items as texts, `[n]` each, in the order of their numbers; None
    if the folder has none.

    Raises:
        RunError: a file is damaged.
    """
    files = [folder / "ids" / f"{name}.txt" for name in ("users", "items")]
    if not all(file.exists() for file in files):
        return None
    users, items = (_read(file) for file in files)
    return users, items


def check_ids(folder: Path, interactions: Interactions) -> None:
    """Check that data have the users and items of a run; of a run without ids it is assumed.

    Raises:
        DataError: they have others, or the same in another order.
        RunError: see `read_ids`.
    """
    ids = interactions.user_ids.astype(str), interactions.item_ids.astype(str)
    if not all(map(np.array_equal, ids, read_ids(folder) or ids)):
        raise DataError(
            f"the data have changed since run {folder}",
            got=f"{len(ids[0]):,} users and {len(ids[1]):,} items, some of them different",
            fix="restore the original data, or run again; `fedrec recommend` takes rows that came"
            " later by --history",
        )


def _read(file: Path) -> np.ndarray:
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        ids = parse_json(f"[{','.join(lines)}]", math.inf)  # as many as there are users
        return np.array(list(map(str, ids)), dtype=object)
    except (OSError, ValueError) as error:
        raise unreadable(file, error, "restore it from a backup, or start the run again") from None


_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Describe the machine and the installed packages, for a run folder."""
    packages = ("fedrec", "flwr", "ray", "torch", "numpy", "numba", "pandas", "autodp", "pydantic")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "packages": {name: installed_version(name) for name in packages},
    }


@functools.cache
def commit() -> str | None:
    """Short hash of the checked-out commit, with a plus if files differ from it; None if fedrec
    does not run from its own checkout."""
    git = ["git", "-C", str(_ROOT)]
    command = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        if not (_ROOT / ".git").exists():
            return None
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is missing.

    Cached, because parsing a package's metadata takes milliseconds.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def default_folder(experiment: Experiment) -> Path:
    """Path of a run without `--output`: `$FEDREC_RUNS` or `runs/`, by name, time and digest."""
    return runs_directory() / f"{experiment.name}-{stamp()}-{experiment.digest()[:6]}"


def stamp() -> str:
    """Current time as part of a folder's name."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def runs_directory() -> Path:
    """Parent of run folders without `--output`: `$FEDREC_RUNS`, or `runs/`."""
    return Path(os.environ.get("FEDREC_RUNS", "runs")).expanduser()
