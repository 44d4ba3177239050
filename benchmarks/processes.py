# SPDX-License-Identifier: Apache-2.0
"""Wall time, processor time and peak memory of a command with everything it starts (Ray's too), and
how busy a GPU is. Linux only.

    python benchmarks/processes.py fedrec run privrec-ml1m --output /tmp/run

No parent waits for the workers of Ray and Flower, so they are missing in the kernel's sums over
terminated children. Therefore the user and system time of every process of the tree is read twice a
second; for a terminated process the last reading counts. Processes that exist, or whose parents
exist, for less than half a second can be missed.

Memory is the proportional set size (PSS), added over the tree: pages that processes share are
counted once. To read it, the kernel walks a process's page tables, and memory allocations of the
process wait meanwhile: for a tree of ten workers this costs up to a fifth of its speed. So memory
is measured only on request, in runs that are not timed, and then more often.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CPU_INTERVAL = 0.5
MEMORY_INTERVAL = 0.2  # seconds; looking takes CPU time too, at memory most


NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=utilization.gpu",
    "--format=csv,noheader,nounits",
    "-lms",
    "200",
)


def child_environment(**values: str) -> dict[str, str]:
    """This process's environment with some values, and this checkout first on the search path."""
    search = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), **values}


def finished(
    command: Sequence[object], timeout: float | None = None, values: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in this checkout to its end, with some values in its environment."""
    line = [*map(str, command)]
    around: Any = {"cwd": ROOT, "env": child_environment(**(values or {})), "timeout": timeout}
    return subprocess.run(line, capture_output=True, text=True, **around)


class TreeWatch(threading.Thread):
    """Watches the tree below a process until that process ends.

    Args:
        root: the process.
        memory: whether memory is measured.
    """

    def __init__(
        self, root: subprocess.Popen[bytes] | subprocess.Popen[str], memory: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self._root = root
        self._memory = memory
        # (process id, start time) -> user + system time in clock ticks
        self._ticks: dict[tuple[int, int], int] = {}
        self._samples: list[tuple[float, float]] = [(time.monotonic(), 0.0)]

    def run(self) -> None:
        """Sample until the root has ended."""
        while self._root.poll() is None:
            alive = self.sample()
            if self._memory:
                self.peak_mib = max(self.peak_mib, sum(pss_mib(process) for process in alive))
            time.sleep(MEMORY_INTERVAL if self._memory else CPU_INTERVAL)

    def sample(self) -> list[int]:
        """Add a sample of CPU time; the ids of the processes of the tree that are alive."""
        now = time.monotonic()
        table = processes()
        members = {
            number for number, (_, start, _) in table.items() if (number, start) in self._ticks
        }
        members.add(self._root.pid)
        grown = True
        while grown:  # a parent may have a higher id than its child
            below = {
                number for number, (parent, _, _) in table.items() if parent in members
            } - members
            members = members | below
            grown = bool(below)
        alive = [number for number in members if number in table]
        self._ticks |= {(number, table[number][1]): table[number][2] for number in alive}
        self._samples.append((now, sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")))
        return alive

    def cpu_seconds(self, begin: float, end: float) -> float:
        """CPU seconds of the tree between two times of the monotonic clock, linear between
        samples."""
        return self._until(end) - self._until(begin)

    def _until(self, moment: float) -> float:
        index = bisect_left(self._samples, (moment, 0.0))
        if index in (0, len(self._samples)):
            return self._samples[min(index, len(self._samples) - 1)][1]
        (before, low) = self._samples[index - 1]
        (after, high) = self._samples[index]
        return low + (high - low) * (moment - before) / (after - before)


class GpuWatch(threading.Thread):
    """Reads GPU utilisation from nvidia-smi; does nothing without a GPU.

    Args:
        device: `cuda`, or anything else.
        command: what says so, a line of percent for each look and GPU.
    """

    def __init__(self, device: str, command: Sequence[str] = NVIDIA_SMI) -> None:
        super().__init__(daemon=True)
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if device == "cuda":
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.start()

    def run(self) -> None:
        """Note what is said until `stop`."""
        if self._process is not None and self._process.stdout is not None:
            for line in self._process.stdout:
                self._samples.append((time.monotonic(), float(line) / 100))

    def stop(self) -> None:
        """End the watching."""
        if self._process is not None:
            self._process.terminate()
            self.join()
            self._process.wait()

    def figures(self, begin: float, end: float) -> dict[str, float]:
        """Mean share of the time that a kernel ran, between two times of the monotonic clock;
        nothing if not asked."""
        shares = [share for moment, share in self._samples if begin <= moment <= end]
        return {"gpu_busy": sum(shares) / len(shares)} if shares else {}


def processes() -> dict[int, tuple[int, int, int]]:
    """Process id -> parent's id, start time, user + system time, the times in clock ticks."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            table[int(entry)] = (int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))
    return table


def pss_mib(process: int) -> float:
    """Proportional set size of one process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main() -> None:
    """Run the command of the command line and print what it took, as JSON."""
    started = time.monotonic()
    process = subprocess.Popen(sys.argv[1:])
    tree = TreeWatch(process, memory=True)
    tree.start()
    status = process.wait()
    tree.join()
    ended = time.monotonic()
    report = {
        "command": sys.argv[1:],
        "exit": status,
        "seconds": round(ended - started, 1),
        "processor_seconds": round(tree.cpu_seconds(started, ended), 1),
        "peak_pss_mib": round(tree.peak_mib),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
