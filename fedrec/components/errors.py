# SPDX-License-Identifier: Apache-2.0
"""Errors that name the faulty component: its class, its file and the failure. A plug-in is
third-party code and may fail in any way. Callers state what it was doing, so that a failure becomes
an error with a name, a file and a reason instead of a traceback through fedrec.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import numpy as np

from fedrec.errors import ComponentError, FedrecError
from fedrec.runtime import process


def file_of(component: object) -> str:
    """The file that defines a component (a class or an object of it); empty where there is none."""
    cls = component if inspect.isclass(component) else type(component)
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):
        return ""


def named(kind: str, component: object) -> str:
    """Description of a component: its kind, its class and its file."""
    cls = component if inspect.isclass(component) else type(component)
    file = file_of(cls)
    return f"{kind} {cls.__name__!r}" + (f" ({file})" if file else "")


def line_of(error: BaseException) -> str:
    """File and line where an exception was raised; empty without a traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def raised_by_code(error: KeyboardInterrupt) -> bool:
    """Whether a `raise` statement raised the exception, and not a signal."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    code = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return (
        dis.opname[code] == "RAISE_VARARGS"
        and innermost.tb_frame.f_globals.get("__name__") != process.__name__
    )


@contextmanager
def component_errors(kind: str, component: object, doing: str) -> Iterator[None]:
    """Turn exceptions raised within into errors that name the component.

    Args:
        kind: its kind, such as `"strategy"`.
        component: the component or its class.
        doing: the context, such as `"in round 3"`.

    Raises:
        ComponentError: anything but an error that explains itself (`FedrecError`) was raised
            within.
    """
    try:
        yield
    except FedrecError:
        raise
    except Exception as error:
        place = line_of(error)
        raise ComponentError(
            f"{named(kind, component)} failed {doing}",
            got=f"{type(error).__name__}: {error}"
            + (f" ({place})" if place and place[:1] != "<" else ""),
            fix="fix that file; fedrec --debug shows the whole traceback",
        ) from error


def refuse_wrong(kind: str, component: object, doing: str, *, expected: str, got: str) -> None:
    """Raise an error about a component's wrong result.

    Raises:
        ComponentError: always.
    """
    raise ComponentError(
        f"{named(kind, component)} returned a wrong result {doing}",
        expected=expected,
        got=got,
        fix="fix that file; the contract tests of fedrec.testing find such faults",
    )


def refuse_other_arrays(
    kind: str, component: object, doing: str, found: Any, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that named arrays (or tensors) have the expected names and shapes.

    Raises:
        ComponentError: they are not.
    """
    shapes = (
        {str(n): tuple(getattr(v, "shape", ())) for n, v in found.items()}
        if isinstance(found, Mapping)
        else None
    )
    if shapes == dict(expected):
        return
    if shapes is None:
        refuse_wrong(
            kind,
            component,
            doing,
            expected=f"arrays by name: {dict(expected)}",
            got=type(found).__name__,
        )
        return
    wrong = [n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n)]
    shown = [{n: table[n] for n in wrong if n in table} for table in (dict(expected), shapes)]
    refuse_wrong(
        kind,
        component,
        doing,
        expected=f"the shapes {shown[0]}",
        got=f"{shown[1] or 'nothing of these names'}",
    )


def finite(values: Any) -> bool:
    """Whether an array or a tensor holds numbers only."""
    with np.errstate(all="ignore"):
        # any NaN or infinity makes the sum one; a sum can also overflow
        total = float(values.sum())
    return bool(np.isfinite(total)) or bool(np.isfinite(np.asarray(values)).all())


class Unchanged:
    """Detects changes of arrays that were passed read-only.

    Args:
        arrays: by name.
        whole: returns copies to compare with; None compares sums only, which costs one pass and no
            memory.
    """

    def __init__(
        self, arrays: Mapping[str, Any], whole: Callable[[Any], Any] | None = None
    ) -> None:
        self.arrays = dict(arrays)
        self._before = (
            {name: _digest(value) for name, value in self.arrays.items()} if whole is None else {}
        )
        self._copies = (
            {} if whole is None else {name: whole(value) for name, value in self.arrays.items()}
        )

    def changed(self) -> list[str]:
        """Names of the arrays that have changed."""
        moved = [
            name for name, digest in self._before.items() if _digest(self.arrays[name]) != digest
        ]
        for name, copy in self._copies.items():
            if not np.array_equal(np.asarray(copy), np.asarray(self.arrays[name]), equal_nan=True):
                moved.append(name)
        return moved

    def refuse(self, kind: str, component: object, doing: str) -> None:
        """Check that no array has changed.

        Raises:
            ComponentError: some were changed.
        """
        moved = self.changed()
        if moved:
            shown = ", ".join(map(repr, moved))
            refuse_wrong(
                kind,
                component,
                doing,
                expected="unchanged inputs",
                got=f"changed {shown} in place",
            )


def _digest(value: Any) -> str:
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        return (
            f"{array.sum(dtype=np.float64)!r}"
            f" {array.ravel()[: 1 << 16].std() if array.size else 0!r}"
        )
