# SPDX-License-Identifier: Apache-2.0
"""Matrix products in compiled code, by the BLAS that PyTorch brings with it, or else SciPy's.

A BLAS routine takes everything by address, in Fortran's column-major words: a row-major matrix `[a, b]` is `b x a`
there. Products with a vector are loops here, because such a call takes longer than the work.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import get_cython_function_address, intrinsic

from fedrec.cohort.kernel.memory import FAST

_SYMBOL = "fedrec_sgemm"
_PLAIN, _TRANSPOSED = np.uint8(ord("N")), np.uint8(ord("T"))


def _sgemm_address() -> int:
    """Where the routine is in memory. SciPy's takes the same arguments, and is there on every platform."""
    try:
        brought = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(brought.sgemm_, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return get_cython_function_address("scipy.linalg.cython_blas", "sgemm")


llvmlite.binding.add_symbol(_SYMBOL, _sgemm_address())


@intrinsic
def _sgemm(typing, word_a, word_b, m, n, k, alpha, a, row_a, b, row_b, beta, c, row_c):
    """BLAS `sgemm` with its arguments by value, and the matrices by address."""
    kinds = (word_a, word_b, m, n, k, alpha, a, row_a, b, row_b, beta, c, row_c)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = []
        for kind, value in zip(kinds, arguments, strict=True):
            if kind in (types.intp, types.uintp):  # the address of a matrix
                pointers.append(builder.inttoptr(value, cgutils.voidptr_t))
                continue
            place = cgutils.alloca_once(builder, value.type)
            builder.store(value, place)
            pointers.append(builder.bitcast(place, cgutils.voidptr_t))
        routine = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] * len(kinds))
        builder.call(cgutils.get_or_insert_function(builder.module, routine, _SYMBOL), pointers)
        return context.get_dummy_value()

    return types.void(*kinds), generate


@njit(**FAST)
def add_product(alpha, a, a_transposed, b, b_transposed, beta, out):
    """out = alpha op(a) op(b) + beta out, all `float32`, row-major and contiguous; op transposes or does nothing."""
    rows, columns = out.shape
    inner = a.shape[0] if a_transposed else a.shape[1]
    if columns == 1 or inner == 1:
        _scale(out.reshape(-1), beta)
        if inner == 1:
            _add_outer(alpha, a.reshape(-1), b.reshape(-1), out)
        elif a_transposed:
            _add_rows(alpha, b.reshape(-1), a, out.reshape(-1))
        else:
            _add_dots(alpha, a, b.reshape(-1), out.reshape(-1))
        return
    word_b, word_a = _TRANSPOSED if b_transposed else _PLAIN, _TRANSPOSED if a_transposed else _PLAIN
    m, n, k = np.int32(columns), np.int32(rows), np.int32(inner)
    at_b, at_a, at_out = b.ctypes.data, a.ctypes.data, out.ctypes.data
    row_b, row_a = np.int32(b.shape[1]), np.int32(a.shape[1])
    _sgemm(  # pyright: ignore[reportCallIssue]
        word_b, word_a, m, n, k, np.float32(alpha), at_b, row_b, at_a, row_a, np.float32(beta), at_out, m
    )


@njit(**FAST)
def _scale(values, factor):
    if factor == 0:  # what was there may be anything
        values[:] = 0
    elif factor != 1:
        values *= factor


@njit(**FAST)
def _add_outer(alpha, column, row, out):
    for r in range(len(out)):
        target, factor = out[r], alpha * column[r]
        for c in range(target.size):
            target[c] += factor * row[c]


@njit(**FAST)
def _add_rows(alpha, factors, matrix, out):
    """out += alpha factors matrix, for a matrix whose rows are added up."""
    for r in range(len(matrix)):
        row, factor = matrix[r], alpha * factors[r]
        for c in range(out.size):
            out[c] += factor * row[c]


@njit(**FAST)
def _add_dots(alpha, matrix, vector, out):
    """out += alpha matrix vector, for a matrix whose rows are multiplied."""
    for r in range(len(matrix)):
        row, total = matrix[r], np.float32(0)
        for c in range(vector.size):
            total += row[c] * vector[c]
        out[r] += alpha * total
