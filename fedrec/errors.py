# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can fix, and the check that no other package shadows one of fedrec's."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

# Errors that a user can fix. Every error states what was expected, what was found, and how to fix
# it. The command line prints these three without a traceback and exits with `exit_code`; any other
# exception is a defect of fedrec or of a plug-in.


class FedrecError(Exception):
    """Base class of all errors that a user can fix.

    Args:
        problem: one sentence that names the cause (a key, a file, a client).
        expected: what is expected.
        got: what was found instead.
        fix: what to do about it.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(self.text())

    def __reduce__(self):
        # Exceptions with keyword-only arguments need this to be pickled, and these are sent between
        # processes.
        return _rebuild, (type(self), self.problem, self.expected, self.got, self.fix)

    def text(self) -> str:
        """Full message, one line per part."""
        parts = [("expected", self.expected), ("got", self.got), ("fix", self.fix)]
        return "\n".join(
            [self.problem, *(f"  {label}: {value}" for label, value in parts if value is not None)]
        )

    def about(self, subject: str) -> FedrecError:
        """Return the error with a prefix that names its subject."""
        return _rebuild(type(self), f"{subject}: {self.problem}", self.expected, self.got, self.fix)


def _rebuild(kind, problem, expected, got, fix):
    return kind(problem, expected=expected, got=got, fix=fix)


class ExperimentError(FedrecError):
    """An experiment file, an override or a setting is wrong."""

    exit_code = 2


class DataError(FedrecError):
    """A dataset is missing, damaged, or not in its documented format."""

    exit_code = 3


class RunError(FedrecError):
    """A run folder cannot be read, written or resumed."""

    exit_code = 4


class ClientError(FedrecError):
    """A client's local work failed."""

    exit_code = 5


class RefusalError(ClientError):
    """A node refuses an order. As the only error whose text leaves a real node, it contains only
    data that the server sent or the node's owner has published."""

    exit_code = 8


class EngineError(FedrecError):
    """An engine (serial, ray, flower) failed."""

    exit_code = 6


class ComponentError(FedrecError):
    """A component, built-in or a plug-in, violated its contract."""

    exit_code = 7


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest the known words most similar to `word`, or list all if none is similar."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(name) for name in near) + "?"
    return (
        "known: " + ", ".join(repr(name) for name in known) if known else "this table has no keys"
    )


def unknown(what: str, name: str, known: Iterable[str], expected: str = "") -> ExperimentError:
    """Create the error for an unknown name.

    Args:
        what: what it names.
        name: the name.
        known: the known names.
        expected: possible names, in words; default: the known ones.
    """
    known = list(known)
    return ExperimentError(
        f"unknown {what} {name!r}",
        expected=expected or f"one of {', '.join(known)}",
        fix=did_you_mean(name, known),
    )


def unreadable(path: Path, got: object, fix: str = "restore it from a backup") -> RunError:
    """Create the error for a file of a run or a study that is damaged or protected; `got` is the
    exception or a description."""
    described = f"{type(got).__name__}: {got}" if isinstance(got, Exception) else str(got)
    return RunError(f"{path} cannot be read", got=described, fix=fix)


def missing_file(what: str, path: Path, fix: str) -> DataError:
    """Create the error for a missing data file; `what` describes the file."""
    return DataError(f"{what} is missing", expected=f"a file {path}", got="nothing", fix=fix)


# The packages beside fedrec have common names: a file or folder of the same name beside a script or
# notebook would be imported instead.

ROOT = Path(__file__).resolve().parents[1]
NEIGHBOURS = ("clients", "server", "strategies", "simulations")


def require_own_packages() -> None:
    """Check that the neighbouring packages belong to fedrec, without importing them.

    Raises:
        ImportError: another file or folder shadows one.
    """
    for name in NEIGHBOURS:
        file = _file_of(name)
        if file is not None and not file.is_relative_to(ROOT):
            shown = file.parent if file.name == "__init__.py" else file
            raise ImportError(
                f"{shown} hides a package of fedrec\n"
                f"  expected: the package {name!r} in {ROOT}\n"
                f"  got: another {name!r}, which Python finds first\n"
                "  fix: python -P script.py, or PYTHONSAFEPATH=1 in the environment (for notebooks,"
                f" too), so that Python does not search {shown.parent} first; if PYTHONPATH has"
                " that folder, take it out",
                name=name,
                path=str(file),
            )


def _file_of(name: str) -> Path | None:
    """File that `import name` would execute, or has executed; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module made by hand
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None
