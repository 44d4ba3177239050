# SPDX-License-Identifier: Apache-2.0
"""Addresses that processes listen on, by Linux's `/proc`."""

import os
from pathlib import Path


def listening_below(pid):
    """Addresses that a process and its descendants listen on: those of loopback, and all others,
    as in `/proc/net/tcp`."""
    group = {pid}
    while (
        more := {
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/stat")
            if parent_of(file) in group
        }
        - group
    ):
        group |= more
    found = {row for one in group for row in _listening(one)}
    own = {row for row in found if row.endswith("0100007F")}  # 127.0.0.1; zeros are all
    return own, found - own


def parent_of(file):
    """The parent of a process, by its `stat`."""
    try:
        return int(file.read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _listening(pid):
    sockets = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    except OSError:
        return
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                yield local.partition(":")[0]
