# SPDX-License-Identifier: Apache-2.0
"""Wall time, processor time and peak memory of a command with everything it starts (Ray's too).

    python benchmarks/whole_run.py fedrec run privrec-ml1m --output /tmp/run

Memory is the proportional set size (PSS) from `/proc`, added over the process tree and sampled
twice a second: pages that processes share are counted once, which a sum of resident sizes does not
do. Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def children() -> dict[int, list[int]]:
    """Parent process id -> ids of its children."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended while we looked
                continue
            found.setdefault(parent, []).append(int(entry.name))
    return found


def descendants(root: int) -> list[int]:
    """A process and everything below it."""
    tree = children()
    found = [root]
    for process in found:
        found += tree.get(process, [])
    return found


def pss_mib(process: int) -> float:
    """Proportional set size of one process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def label(process: int) -> str:
    """What a process is, in a few words."""
    try:
        command = (
            Path(f"/proc/{process}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return "ended"
    words = command.split()
    return " ".join([os.path.basename(words[0]), *words[1:3]])[:60] if words else "?"


def main() -> None:
    """Run the command of the command line and print what it took, as JSON."""
    started = time.perf_counter()
    process = subprocess.Popen(sys.argv[1:])
    peak = 0.0
    parts = {}
    while process.poll() is None:
        sizes = {child: pss_mib(child) for child in descendants(process.pid)}
        if sum(sizes.values()) > peak:
            peak = sum(sizes.values())
            parts = {
                f"{label(child)} [{child}]": round(size)
                for child, size in sizes.items()
                if size >= 5
            }
        time.sleep(0.5)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "command": sys.argv[1:],
        "exit": process.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        "user_seconds": round(used.ru_utime, 1),
        "system_seconds": round(used.ru_stime, 1),
    }
    biggest = dict(sorted(parts.items(), key=lambda item: -item[1]))
    print(json.dumps({**report, "peak_pss_mib": round(peak), "at_peak_mib": biggest}, indent=2))


if __name__ == "__main__":
    main()
