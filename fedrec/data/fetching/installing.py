# SPDX-License-Identifier: Apache-2.0
"""Atomic installation of a dataset into its folder."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrec.data.files.published import DatasetSource
from fedrec.errors import DataError


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block succeeds, and is deleted otherwise.

    It is beside `folder`, so that the last step is a rename within one file system.

    Raises:
        DataError: `folder` exists already, or the disk is full.
    """
    require_absent(folder)
    with scratch(folder) as temporary:
        yield temporary
        os.replace(temporary, folder)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that is deleted after the block.

    Raises:
        DataError: the disk is full.
    """
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
        temporary.mkdir()  # with the permissions of the umask
        if folder.is_dir():
            temporary.chmod(folder.stat().st_mode & 0o777)  # an empty folder may be replaced
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def require_absent(folder: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        DataError: the folder exists and is not empty.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise DataError(
            f"{folder} exists already",
            expected="no such folder",
            got="a folder with files" if folder.is_dir() else "a file",
            fix="use it as it is, or delete it first",
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn "disk full" and "not allowed" inside the block into an error that the user can fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free if folder.exists() else 0
            raise DataError(
                f"the disk of {folder} is full",
                expected="room for the dataset",
                got=f"{free:,} bytes free",
                fix="make room, or set FEDREC_DATA to a folder on another disk",
            ) from None
        if isinstance(error, PermissionError):
            fix = "allow it, or set FEDREC_DATA to a folder of your own"
            raise DataError(
                f"{folder} cannot be written", expected="permission", got=str(error), fix=fix
            ) from None
        raise


def collect(
    source: DatasetSource, name: str, candidates: Iterator[tuple[Path, Path]], target: Path
) -> None:
    """Copy a dataset's files, wherever they lie among the candidates, to `target`.

    Args:
        source: names the files.
        name: the dataset's name.
        candidates: each file's path, and its path relative to the folder that is searched.
        target: an existing folder.

    Raises:
        DataError: a needed file is missing, or two candidates fit one file.
    """
    files = sorted(candidates, key=lambda pair: (len(pair[1].parts), pair[1]))
    found: dict[Path, tuple[Path, Path]] = {}
    for path, relative in files:
        for pattern in (*source.files, *source.extras):
            if relative.match(pattern):
                inner = Path(*relative.parts[-len(Path(pattern).parts) :])
                _require_single(found.get(inner), relative)
                found.setdefault(inner, (path, relative))
    missing = [file for file in source.files if Path(file) not in found]
    if missing or not found:
        raise DataError(
            f"these are not the files of {name!r}",
            expected=", ".join(source.files or source.extras),
            got="without " + ", ".join(missing) if missing else "none of them",
            fix=f"see {source.page}",
        )
    for inner, (path, _) in found.items():
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / inner)


def _require_single(known: tuple[Path, Path] | None, relative: Path) -> None:
    """Of two candidates the one nearer to the root counts; two at the same depth are ambiguous."""
    if known is not None and len(known[1].parts) == len(relative.parts):
        raise DataError(
            "two files fit one name",
            expected=f"one {relative.name}",
            got=f"{known[1]} and {relative}",
            fix="name the folder that holds the right one",
        )


def files_below(folder: Path) -> Iterator[tuple[Path, Path]]:
    """All plain files at any depth: each path, and its path relative to the folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.relative_to(folder)
