# SPDX-License-Identifier: Apache-2.0
"""Compiles a function once per machine and version of its source, and caches the result.

Numba's own cache is beside each source file and depends on that file only: a copy of fedrec, such
as Flower makes to distribute an app, would compile everything again, and a change in a function
called from another file would be ignored. Here the folder, in the user's cache, is named by one
digest of all sources in the function's folder, and of the products and layers that others call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

log = logging.getLogger("fedrec")
FAST = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_FEDREC = Path(__file__).resolve().parents[1]
_KERNEL = _FEDREC / "cohort" / "kernel"
_CALLED = _FEDREC / "nn" / "native"


def cache_folder(sources: Path = _KERNEL) -> Path:
    """`$FEDREC_CACHE/kernel-DIGEST`, default `~/.cache/fedrec`; of other sources that folder's name
    and digest."""
    base = Path(os.environ.get("FEDREC_CACHE") or "~/.cache/fedrec").expanduser()
    return base / f"{sources.name}-{_digest(sources)[:16]}"


def is_compiled(sources: Path = _KERNEL) -> bool:
    """Whether an earlier process has compiled this version of the kernel, or of other sources,
    here."""
    return any(cache_folder(sources).glob("*.nbi"))


def compiled(function: Callable[..., Any], flags: Mapping[str, Any] = FAST) -> Any:
    """A function as compiled code that releases Python's global lock, cached between processes;
    `flags` are those of `numba.njit`."""
    made = numba.njit(nogil=True, **flags)(function)
    with contextlib.suppress(RuntimeError):  # no writable folder: each process compiles again
        made._cache = _Cache(made.py_func)  # type: ignore[attr-defined]
    return made


@functools.cache
def _digest(sources: Path) -> str:
    """Digest of all sources in a folder, of those that others call, and of Numba's version."""
    found = hashlib.sha256(numba.__version__.encode())
    folders = sorted({sources, _CALLED})
    for source in [Path(__file__), *(one for own in folders for one in sorted(own.glob("*.py")))]:
        found.update(source.name.encode() + b"\0" + source.read_bytes())
    return found.hexdigest()


@functools.cache
def _usable(folder: Path) -> bool:
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


class _Locator(_CacheLocator):
    """Numba's locator of cached code."""

    def __init__(self, name: str, sources: Path) -> None:
        self._name = name
        self._sources = sources

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        """The locator; None if the folder cannot be used, see `_usable`. A read-only one is
        sufficient."""
        sources = Path(py_file).parent
        if not _usable(cache_folder(sources)):
            return None
        return cls(py_func.__qualname__, sources)

    def get_cache_path(self) -> str:
        """The folder."""
        return str(cache_folder(self._sources))

    def get_source_stamp(self) -> str:
        """The version of the source."""
        return _digest(self._sources)

    def get_disambiguator(self) -> str:
        """The function."""
        return self._name


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache compiled code, if the folder is writable."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
