# SPDX-License-Identifier: Apache-2.0
"""Imports a local copy of a dataset: a zip, a tar, a folder or a single file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrec.components.registry import DATASET, resolve
from fedrec.data.fetching.installing import collect, files_below, require_absent, scratch, staged
from fedrec.data.files.archives import is_archive, unpack
from fedrec.data.reader import Reader
from fedrec.errors import DataError


def import_data(name: str, path: Path) -> Path:
    """Copy a dataset into the data directory, after its reader has verified it; on an error nothing
    is left behind.

    Args:
        name: of the dataset, such as `"ml-1m"`.
        path: a zip, a tar (compressed or not), a folder, or a single data file. Files are found at
            any depth.

    Returns:
        The dataset's folder.

    Raises:
        DataError: the files are missing, damaged or not the published ones, or the dataset's folder
            exists already.
        ExperimentError: there is no such dataset.
    """
    reader_class: type[Reader] = resolve(DATASET, name)
    source = reader_class.source
    if source is None:
        fix = (
            "name your file in the experiment (dataset.path)"
            if name == "table"
            else "this dataset needs no import"
        )
        raise DataError(
            f"{name!r} is not a dataset to import",
            expected="a published dataset",
            got=name,
            fix=fix,
        )
    folder = reader_class(name, reader_class.Config()).default_folder()
    require_absent(folder)
    with _searched(path, folder) as candidates, staged(folder) as staging:
        collect(source, name, candidates, staging)
        reader_class(name, reader_class.Config(path=staging)).read()
    return folder


@contextmanager
def _searched(path: Path, folder: Path) -> Iterator[Iterator[tuple[Path, Path]]]:
    """The candidate files; an archive is unpacked temporarily beside the dataset's folder."""
    if not path.exists():
        raise DataError(
            "there is nothing to import",
            expected=f"a file or folder {path}",
            got="nothing",
            fix="correct the path",
        )
    if path.is_dir():
        yield files_below(path)
    elif not path.is_file():
        raise DataError(
            f"{path} cannot be imported",
            expected="a file or a folder",
            got="a pipe, a socket or a device",
            fix="save the data in a file",
        )
    elif not is_archive(path):
        yield iter([(path, Path(path.name))])
    else:
        with scratch(folder) as unpacked:
            unpack(path, unpacked)
            yield files_below(unpacked)
