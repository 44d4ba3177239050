# SPDX-License-Identifier: Apache-2.0
"""Compiles a function once per machine and version of its source, and keeps the result.

Numba's own cache lies beside each source file and watches that file alone: a copy of fedrec, such
as Flower makes to send an app around, would compile everything anew, and a change in a function
that is called from another file would go unseen. Here one digest over all sources beside that of
the function names the folder, in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

FAST = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_KERNEL = Path(__file__).resolve().parents[1] / "cohort" / "kernel"


def cache_folder(sources: Path = _KERNEL) -> Path:
    """`$FEDREC_CACHE/kernel-DIGEST`, default `~/.cache/fedrec`; of other sources that folder's name
    and digest."""
    base = Path(os.environ.get("FEDREC_CACHE") or "~/.cache/fedrec").expanduser()
    return base / f"{sources.name}-{_digest(sources)[:16]}"


def is_compiled() -> bool:
    """Whether an earlier process has compiled this version here."""
    return any(cache_folder().glob("*.nbi"))


def compiled(function: Callable[..., Any]) -> Any:
    """A function as compiled code that lets go of Python's lock; kept from one process to the
    next."""
    made = numba.njit(nogil=True, **FAST)(function)
    with contextlib.suppress(RuntimeError):  # there is no folder: each process compiles for itself
        made._cache = _Cache(made.py_func)  # type: ignore[attr-defined]
    return made


@functools.cache
def _digest(sources: Path) -> str:
    """Of every source in a folder, and of Numba's version."""
    found = hashlib.sha256(numba.__version__.encode())
    for source in [Path(__file__), *sorted(sources.glob("*.py"))]:
        found.update(source.name.encode() + b"\0" + source.read_bytes())
    return found.hexdigest()


class _Locator(_CacheLocator):
    """Where compiled code is kept, and what it belongs to."""

    def __init__(self, name: str, sources: Path) -> None:
        self._name, self._sources = name, sources

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        """The locator; None where there is no folder and none can be made. One that is only to be
        read will do."""
        sources = Path(py_file).parent
        try:
            cache_folder(sources).mkdir(parents=True, exist_ok=True)
        except OSError:
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
        """Keep what was compiled, if the folder can be written."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
