# SPDX-License-Identifier: Apache-2.0
"""Errors that name the faulty component: its class, its file and the failure. A plug-in is
third-party code and may fail in any way. Callers state what it was doing, so that a failure becomes
an error with a name, a file and a reason instead of a traceback through fedrec.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import numpy as np

from fedrec.errors import ComponentError, FedrecError


def file_of(component: object) -> str:
    """File that defines a component (a class or an object); empty if there is none."""
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


@contextmanager
def component_errors(kind: str, component: object, doing: str) -> Iterator[None]:
    """Convert exceptions in the block into errors that name the component.

    Args:
        kind: its kind, such as `"strategy"`.
        component: the component or its class.
        doing: the context, such as `"in round 3"`.

    Raises:
        ComponentError: an exception other than a `FedrecError` was raised.
    """
    try:
        yield
    except FedrecError:
        raise
    except Exception as error:
        line = line_of(error)
        raise ComponentError(
            f"{named(kind, component)} failed {doing}",
            got=f"{type(error).__name__}: {error}"
            + (f" ({line})" if line and line[:1] != "<" else ""),
            fix="fix that file; fedrec --debug shows the whole traceback",
        ) from error


def refuse_wrong(kind: str, component: object, doing: str, *, expected: str, got: str) -> None:
    """Raise an error about a component's wrong result.

    Raises:
        ComponentError: always.
    """
    raise ComponentError(
        f"{named(kind, component)} returned an invalid result {doing}",
        expected=expected,
        got=got,
        fix="fix that file; the contract tests of fedrec.testing find such faults",
    )


def refuse_other_arrays(
    kind: str, component: object, doing: str, arrays: Any, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that named arrays (or tensors) have the expected names and shapes.

    Raises:
        ComponentError: names or shapes differ.
    """
    if not isinstance(arrays, Mapping):
        got = type(arrays).__name__
        refuse_wrong(kind, component, doing, expected=f"arrays by name: {dict(expected)}", got=got)
        return
    shapes = {str(n): tuple(getattr(v, "shape", ())) for n, v in arrays.items()}
    wrong = [n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n)]
    if wrong:
        right, got = ({n: t[n] for n in wrong if n in t} for t in (expected, shapes))
        got = f"{got or 'no arrays with these names'}"
        refuse_wrong(kind, component, doing, expected=f"the shapes {right}", got=got)


def finite(values: Any) -> bool:
    """True if all values of an array or tensor are finite."""
    with np.errstate(all="ignore"):
        # any NaN or infinity makes the sum non-finite; a sum can also overflow
        total = float(values.sum())
    return bool(np.isfinite(total)) or bool(np.isfinite(np.asarray(values)).all())
