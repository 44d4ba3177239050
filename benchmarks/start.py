# SPDX-License-Identifier: Apache-2.0
"""Processor time and memory of the start of a run: all that is done before the first parameters.

    python benchmarks/start.py [USERS]

The run is `privrec-synthetic` with a million items and ten interactions a user, on the serial
engine; it stops before its first round.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SETTINGS = (
    "dataset.items=1000000",
    "dataset.mean-interactions=10",
    "dataset.min-interactions=4",
    "evaluation.baselines=[]",
    "engine.name=serial",
)


class Started(BaseException):
    """Raised where the first parameters would be made; no handler of errors takes it."""


def start(users: int) -> None:
    """Start a run of so many users."""
    from server.loop import Loop
    from simulations.cli import main

    def stop(*_: Any) -> NoReturn:
        raise Started

    Loop._start = stop  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"dataset.users={users}", *SETTINGS)
        sets = [word for setting in settings for word in ("--set", setting)]
        sys.argv = ["fedrec", "run", "privrec-synthetic", *sets, "--output", f"{folder}/run"]
        try:
            main()
        except Started:
            return
    raise SystemExit("the run ended before its first parameters")


def main() -> None:
    """Print the processor time and the largest memory of this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("users", nargs="?", type=int, default=1_000_000)
    users = parser.parse_args().users
    start(users)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{users:,} users: {used.ru_utime:.1f} s of processor time and {used.ru_stime:.1f} s of the"
        f" system's, {used.ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()
