# SPDX-License-Identifier: Apache-2.0
"""Compiles functions once per machine and version of the sources, in Numba's cache.

Numba's cache of a function depends on the function's own file only, and a change in a function
called from another file would be ignored. So it is in a folder that is named by a digest of all
sources that others call. Numba itself is imported with the first function: that takes 18 MiB and a
third of a second, which those who only look for the folder do not need.
"""

import functools
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

log = logging.getLogger("fedrec")
_HERE = Path(__file__).resolve().parent

FAST = {
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz"},
    "no_cfunc_wrapper": True,  # which nothing calls, and which took a sixth of the compilation
}
INNER = {**FAST, "no_cpython_wrapper": True}
"""Flags of functions that only compiled code calls; to call one from Python ends the process."""
ORDERED = {**INNER, "fastmath": {"contract"}}
"""Flags of inner functions whose sums keep the order in which they are written."""
INLINED = {**INNER, "inline": "always"}
"""Flags of functions that are called in each step with records of many arrays, whose references
would be counted at every call: that took as long as the step of a small model."""


def compiled(function: Callable[..., Any], flags: Mapping[str, Any] = FAST) -> Any:
    """A function as compiled code that releases Python's global lock, cached between processes;
    `flags` are those of `numba.njit`."""
    from numba import njit
    from numba.core import config

    folder = cache_folder()
    cached = usable(folder)
    if cached:
        config.CACHE_DIR = str(folder)  # pyright: ignore[reportAttributeAccessIssue]
    return njit(nogil=True, cache=cached, **flags)(function)


def is_compiled(function: str = "train_clients") -> bool:
    """True if an earlier process has compiled this version of the function on this machine."""
    return any(cache_folder().glob(f"*/*.{function}-*.nbi"))


def cache_folder() -> Path:
    """`$FEDREC_CACHE/kernel-DIGEST`, default `~/.cache/fedrec`."""
    base = Path(os.environ.get("FEDREC_CACHE") or "~/.cache/fedrec").expanduser()
    return base / f"kernel-{_digest()[:16]}"


@functools.cache
def _digest() -> str:
    """Digest of the sources whose functions others call, and of Numba's version."""
    digest = hashlib.sha256(version("numba").encode())
    for folder in (_HERE, _HERE.parent / "training"):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@functools.cache
def usable(folder: Path) -> bool:
    """True if a folder exists, or can be created, is writable, and only this user and root can
    replace its files; warns if others can. Cached code is executed when it is read."""
    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # Numba's folders in it have the process's mode
        # in a sticky folder, such as /tmp, others cannot replace files of this user
        safe = _only_ours(folder.parent, sticky=True) and _only_ours(folder)
    except OSError:
        return False
    if not safe:
        log.warning(
            "%s is not used, because other users can write to it and cached code is executed; set"
            " FEDREC_CACHE to a folder of your own, or take their permission to write (chmod go-w)",
            folder,
        )
    return safe and os.access(folder, os.W_OK)


def _only_ours(folder: Path, sticky: bool = False) -> bool:
    if not hasattr(os, "getuid"):  # no owners and modes of that kind
        return True
    status = folder.stat()
    shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if sticky and status.st_mode & stat.S_ISVTX:
        shared = False
    return status.st_uid in (0, os.getuid()) and not shared
