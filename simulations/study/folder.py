# SPDX-License-Identifier: Apache-2.0
"""The folder of a study: a JSON file that says which study it is, and the folders of its jobs."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedrec.errors import RunError
from fedrec.runs.folder_lock import locked
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.new_folders import require_new_folder
from fedrec.runtime.text_files import read_json


class StudyFolder:
    """A study on disk.

    Args:
        path: of the folder.
        about: name of the JSON file that says which study it is.
        kind: of the study, such as `sweep`, for errors.
    """

    def __init__(self, path: Path, about: str, kind: str) -> None:
        self.path = path.expanduser().resolve()
        self.about = about
        self.kind = kind

    def begun(self) -> bool:
        """Whether a study is there.

        Raises:
            RunError: something else is at the path.
        """
        if (self.path / self.about).is_file():
            return True
        require_new_folder(
            self.path, expected=f"a new or empty folder, or that of the same {self.kind}"
        )
        return False

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against a second process.

        Raises:
            RunError: another process holds it.
        """
        return locked(
            self.path,
            expected=f"one process per {self.kind}",
            got="another process that is running it",
            fix="wait for it, stop it, or choose another --output",
        )

    def read(self, name: str) -> Any:
        """The content of a JSON file.

        Raises:
            RunError: it is damaged.
        """
        try:
            return read_json(self.path / name)
        except (OSError, ValueError) as error:
            raise self.damaged(name, str(error)) from None

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        write_atomically(self.path / name, json.dumps(value, indent=1) + "\n")

    def damaged(self, name: str, got: str) -> RunError:
        """The error for a file that cannot be read."""
        return RunError(
            f"{self.path / name} cannot be read",
            expected="a file as fedrec wrote it",
            got=got,
            fix="restore it from a backup; the run folders below are whole by themselves",
        )
