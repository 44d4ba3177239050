# SPDX-License-Identifier: Apache-2.0
"""The folders of compiled code, found without Numba, whose import takes 18 MiB and a third of a
second.

Numba's own cache is beside each source file and depends on that file only: a copy of fedrec, such
as Flower makes to distribute an app, would compile everything again, and a change in a function
called from another file would be ignored. Here the folder, in the user's cache, is named by one
digest of all sources in the function's folder, and of the products and layers that others call.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
from importlib.metadata import version
from pathlib import Path

log = logging.getLogger("fedrec")
_HERE = Path(__file__).resolve().parent
_KERNEL = _HERE.parent / "training"
_CALLED = _HERE.parent / "kernel"
_COMPILING = (_HERE / "compilation.py", _HERE / "compiled_code.py")


def cache_folder(sources: Path = _KERNEL) -> Path:
    """`$FEDREC_CACHE/training-DIGEST`, default `~/.cache/fedrec`; of other sources that folder's
    name and digest."""
    base = Path(os.environ.get("FEDREC_CACHE") or "~/.cache/fedrec").expanduser()
    return base / f"{sources.name}-{digest(sources)[:16]}"


def is_compiled(sources: Path = _KERNEL, function: str = "train_clients") -> bool:
    """Whether an earlier process has compiled this version of the function here; of the kernel, or
    of other sources."""
    return any(cache_folder(sources).glob(f"*.{function}-*.nbi"))


@functools.cache
def digest(sources: Path) -> str:
    """Digest of all sources in a folder, of those that others call, and of Numba's version."""
    found = hashlib.sha256(version("numba").encode())
    folders = sorted({sources, _CALLED})
    for source in [*_COMPILING, *(one for own in folders for one in sorted(own.glob("*.py")))]:
        found.update(source.name.encode() + b"\0" + source.read_bytes())
    return found.hexdigest()


@functools.cache
def usable(folder: Path) -> bool:
    """Whether a folder exists, or can be created, and only this user and root can replace what is
    in it; warns if others can. Cached code is executed when it is read."""
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o755, parents=True, exist_ok=True)
        # in a sticky folder, such as /tmp, others cannot replace what is this user's
        ours = _only_ours(folder.parent, sticky=True) and _only_ours(folder)
    except OSError:
        return False
    if not ours:
        log.warning(
            "%s is not used, because other users can write to it and cached code is executed; set"
            " FEDREC_CACHE to a folder of your own, or take their permission to write (chmod go-w)",
            folder,
        )
    return ours


def _only_ours(folder: Path, sticky: bool = False) -> bool:
    if not hasattr(os, "getuid"):  # no owners and modes of that kind
        return True
    found = folder.stat()
    shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if sticky and found.st_mode & stat.S_ISVTX:
        shared = False
    return found.st_uid in (0, os.getuid()) and not shared
