# SPDX-License-Identifier: Apache-2.0
"""Copies and sums of rows of numbers in compiled code."""

from __future__ import annotations

from numba import njit

from fedrec.runtime.compilation import FAST


@njit(**FAST)
def copy_row(row, target):
    """Copy a row; if it is short, an assignment takes several times as long."""
    for k in range(target.size):
        target[k] = row[k]


@njit(**FAST)
def repeat_row(row, targets):
    """Copy a row into each of several, `float32 [n, d]`."""
    for n in range(len(targets)):
        copy_row(row, targets[n])


@njit(**FAST)
def add_row(row, total):
    """Add a row to another."""
    for k in range(total.size):
        total[k] += row[k]


@njit(**FAST)
def add_rows(rows, total):
    """Add rows `float32 [n, d]` to one."""
    for n in range(len(rows)):
        add_row(rows[n], total)
