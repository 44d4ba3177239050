# SPDX-License-Identifier: Apache-2.0
"""Process groups of a process and its descendants, by Linux's `/proc`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PAUSE = 0.05  # seconds between two checks


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int


def below(pid: int) -> set[int]:
    """Groups of a process and of all that it has started, directly or not."""
    found = list(_processes())
    groups = set()
    more = {pid}
    known = set(more)
    while more:
        groups |= {one.group for one in found if one.pid in more}
        more = {one.pid for one in found if one.parent in more} - known
        known |= more
    return groups - {os.getpgrp()}


def signal_all(groups: Iterable[int], sign: int) -> None:
    """Send a signal to groups; those that have ended are left out."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, sign)


def ended(groups: set[int], seconds: float) -> bool:
    """Whether all processes of some groups end within a time; those that nobody has waited for
    count as ended."""
    until = time.monotonic() + seconds
    while any(one.group in groups and one.state not in "ZX" for one in _processes()):
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
    return True


def _processes() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended
            state, parent, group, *_ = file.read_text().rsplit(")", 1)[1].split()
            yield _Process(int(file.parent.name), state, int(parent), int(group))
