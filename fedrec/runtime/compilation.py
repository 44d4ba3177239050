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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

log = logging.getLogger("fedrec")

FAST = {
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz"},
    "no_cfunc_wrapper": True,  # which nothing calls, and which took a sixth of the compilation
}
INNER = {**FAST, "no_cpython_wrapper": True}
"""Flags of functions that only compiled code calls; to call one from Python ends the process."""


def compiled(function: Callable[..., Any], flags: Mapping[str, Any] = FAST) -> Any:
    """A function as compiled code that releases Python's global lock, cached between processes;
    `flags` are those of `numba.njit`."""
    made = numba.njit(nogil=True, **flags)(function)
    with contextlib.suppress(RuntimeError):  # no writable folder: each process compiles again
        made._cache = _Cache(made.py_func)  # type: ignore[attr-defined]
    return made


def by_address(function: Callable[..., Any], signature: Any) -> CFunc:
    """A function as compiled code, cached likewise, that other compiled code takes as an argument
    and calls by its address.

    A function that is called by its name is compiled and optimised again in each function that
    calls it, directly or not, which takes seconds if it is large.

    Args:
        function: the function.
        signature: types of its arguments and of what it returns.
    """
    import numba.experimental.function_type  # noqa: F401  (the type of such an argument)

    made = CFunc(function, (signature.args, signature.return_type), {}, dict(FAST))
    with contextlib.suppress(RuntimeError):
        made._cache = _Cache(function)  # type: ignore[assignment]
    made.compile()
    return made


class _Locator(_CacheLocator):
    """Numba's locator of cached code."""

    def __init__(self, name: str, sources: Path) -> None:
        self._name = name
        self._sources = sources

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        """The locator; None if the folder cannot be used, see `usable`. A read-only one is
        sufficient."""
        sources = Path(py_file).parent
        if not usable(cache_folder(sources)):
            return None
        return cls(py_func.__qualname__, sources)

    def get_cache_path(self) -> str:
        """The folder."""
        return str(cache_folder(self._sources))

    def get_source_stamp(self) -> str:
        """The version of the source."""
        return digest(self._sources)

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


# The folders of compiled code.

_KERNEL = Path(__file__).resolve().parents[1] / "training"
_CALLED = _KERNEL.with_name("kernel")


def cache_folder(sources: Path = _KERNEL) -> Path:
    """`$FEDREC_CACHE/training-DIGEST`, default `~/.cache/fedrec`; of other sources that folder's
    name and digest."""
    base = Path(os.environ.get("FEDREC_CACHE") or "~/.cache/fedrec").expanduser()
    return base / f"{sources.name}-{digest(sources)[:16]}"


def is_compiled(sources: Path = _KERNEL, function: str = "train_clients") -> bool:
    """True if an earlier process has compiled this version of the function here; of the kernel, or
    of other sources."""
    return any(cache_folder(sources).glob(f"*.{function}-*.nbi"))


@functools.cache
def digest(sources: Path) -> str:
    """Digest of all sources in a folder, of those that others call, and of Numba's version."""
    total = hashlib.sha256(version("numba").encode())
    files = (file for folder in sorted({sources, _CALLED}) for file in sorted(folder.glob("*.py")))
    for file in (Path(__file__), *files):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


@functools.cache
def usable(folder: Path) -> bool:
    """True if a folder exists, or can be created, and only this user and root can replace what is
    in it; warns if others can. Cached code is executed when it is read."""
    try:
        for path in (folder.parent, folder):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
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
    status = folder.stat()
    shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if sticky and status.st_mode & stat.S_ISVTX:
        shared = False
    return status.st_uid in (0, os.getuid()) and not shared
