# SPDX-License-Identifier: Apache-2.0
"""Folders that a command fills must be new or empty."""

from collections.abc import Callable
from pathlib import Path

from fedrec.errors import RunError


def require_new_folder(
    path: Path,
    *,
    expected: str = "a new or empty folder",
    fix: str = "choose another --output",
    usable: Callable[[Path], bool] = lambda path: not any(path.iterdir()),
) -> None:
    """Refuse a path where something is already.

    Args:
        path: of the folder.
        expected: what may be there, for the error.
        fix: what to do when it is not a run folder.
        usable: whether an existing folder counts as new; default: it is empty.

    Raises:
        RunError: there is something, or the path is no folder.
    """
    if not path.exists() or (path.is_dir() and usable(path)):
        return
    got = "a run folder" if (path / "run.json").is_file() else "other files"
    raise RunError(
        f"{path} is not empty",
        expected=expected,
        got=got if path.is_dir() else "a file",
        fix=fix,
    )
