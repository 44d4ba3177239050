# SPDX-License-Identifier: Apache-2.0
"""Compiles a function once per machine and version of its source, and caches the result, see
`fedrec.runtime.compiled_code`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys

from fedrec.runtime.compiled_code import cache_folder, digest, usable

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

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Cached code; None if there is none.

        Numba's method first imports all that compilation may need, SciPy's linear algebra among
        it: 0.3 s and 27 MiB. Compilation itself does the same. Cached code calls Numba's allocation
        of memory, and C functions that are known or come with the modules it names.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache compiled code, if the folder is writable."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
