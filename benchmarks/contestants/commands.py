# SPDX-License-Identifier: Apache-2.0
"""How each contestant is started, and in which environment.

pfl and FedJAX have environments of their own (`make benchmark-venvs`), below `benchmarks/.venvs` or
where `FEDREC_BENCHMARK_VENVS` points.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

VENVS = Path(__file__).resolve().parent.parent / ".venvs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
HOME = "benchmarks.contestants"


@dataclass(frozen=True)
class Task:
    """What all contestants do.

    Attributes:
        work: path of the archive.
        cohort: users per round.
        items: size of the catalogue.
        device: `cpu` or `cuda`.
        memory_gib: what fedrec may use for the users that it trains at once.
        clip: L2 norm that each user's update is clipped to; 0: none.
    """

    work: str
    cohort: int
    items: int
    device: str = "cpu"
    memory_gib: float = 1.0
    clip: float = 0.0


def commands(task: Task) -> dict[str, tuple[str, list[str]]]:
    """Contestant -> its environment ("" for fedrec's own) and the arguments of that environment's
    Python."""
    work = task.work
    where = [task.device, str(task.memory_gib)]
    ours = ["-m", f"{HOME}.ours", work, str(task.cohort), str(task.items)]
    loop = ["-m", f"{HOME}.loop", work, task.device]
    on_both = {
        "fedrec": ("", [*ours, "ray", *where]),
        "fedrec-serial": ("", [*ours, "serial", *where]),
        "loop": ("", loop),
        "loop-sparse": ("", [*loop, "--sparse"]),
    }
    if task.device != "cpu":
        return on_both
    pfl, fedjax = (
        ["-m", f"{HOME}.{module}", work] for module in ("pfl_research", "fedjax_clients")
    )
    return {
        **on_both,
        "flower": ("", ["-m", f"{HOME}.stock_flower", work]),
        "pfl": ("pfl", [*TORCHRUN, *pfl]),
        "pfl-sparse": ("pfl", [*TORCHRUN, *pfl, "--sparse"]),
        "pfl-1": ("pfl", pfl),
        "pfl-1-sparse": ("pfl", [*pfl, "--sparse"]),
        "fedjax": ("fedjax", [*fedjax, "pmap"]),
        "fedjax-jit": ("fedjax", [*fedjax, "jit"]),
    }


def command(name: str, task: Task) -> list[str]:
    """The command line of one contestant. Ends the program when it is unknown or its environment is
    missing."""
    known = commands(task)
    if name not in known:
        raise SystemExit(f"unknown contestant {name!r} on {task.device}; known: {', '.join(known)}")
    environment, arguments = known[name]
    return [interpreter(environment), *arguments]


def interpreter(environment: str) -> str:
    """The Python of a contestant's environment."""
    if not environment:
        return sys.executable
    python = Path(os.environ.get("FEDREC_BENCHMARK_VENVS", VENVS)) / environment / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"no environment for {environment}: {python} is not there; make it with `make"
            " benchmark-venvs`, or let FEDREC_BENCHMARK_VENVS name the folder that holds it"
        )
    return str(python)
