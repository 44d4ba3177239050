# SPDX-License-Identifier: Apache-2.0
"""Compiles a function once per machine and version of its source, and caches the result, see
`fedrec.runtime.compiled_code`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompileResult, compile_result
from numba.core.runtime import _nrt_python  # pyright: ignore[reportAttributeAccessIssue]

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


class _CachedLibrary(JITCodeLibrary):
    """Cached code. What other compiled code would include of it is read when there is such code:
    it takes 10 MiB, and longer than to load the code.

    Args:
        codegen: of the processor.
        name: of the library.
        code: the compiled code.
        included: the same before it was compiled.
        symbols: names of functions that may be in the code.
    """

    def __init__(
        self, codegen: Any, name: str, code: bytes, included: bytes, symbols: Iterable[str]
    ) -> None:
        super().__init__(codegen, name)
        self._included = included
        self.enable_object_caching()
        self._set_compiled_object(code)
        self._finalize_final_module()
        known = {symbol for symbol in symbols if symbol.encode() in code}
        codegen._engine._defined_symbols |= known

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = llvm.parse_bitcode(self._included)
        return super()._get_module_for_linking()


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (_Locator,)

    def rebuild(self, target_context: Any, payload: Any) -> CompileResult:
        """A cached function, of what `reduce` returned."""
        library, function, environment, signature, _, _, types, starts, environments = payload
        for start in starts:
            start()
        name, _, (code, included) = library
        codegen = target_context.codegen()
        symbols = (
            function.llvm_func_name,
            function.llvm_cpython_wrapper_name,
            function.llvm_cfunc_wrapper_name,
        )
        made = _CachedLibrary(codegen, name, code, included, symbols)
        entry = target_context.get_executable(made, function, environment)
        for own in environments:
            codegen.set_env(own.env_name, own)
        return compile_result(
            typing_context=target_context.typing_context,
            target_context=target_context,
            entry_point=entry,
            type_annotation=types,
            signature=signature,
            objectmode=False,
            lifted=(),
            fndesc=function,
            library=made,
            environment=environment,
            reload_init=starts,
            referenced_envs=environments,
        )


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Cached code; None if there is none.

        Numba's method first imports all that compilation may need, SciPy's linear algebra among
        it, and compiles counters of references: 0.3 s and 47 MiB. Compilation itself does the same.
        Cached code has its own counters, calls Numba's allocation of memory, and C functions that
        are known or come with the modules it names.
        """
        for name, address in _nrt_python.c_helpers.items():
            llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache compiled code, if the folder is writable."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
