# SPDX-License-Identifier: Apache-2.0
"""Tasks that an executor has started and that have not ended, kept in files.

If an executor is killed together with its children, as in a container, nobody reports that their
tasks failed, and Flower waits five minutes for a ServerApp's next heartbeat. When the executor is
restarted, it finds them here and reports them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedrec.runtime.text_files import read_json
from simulations.deployment.pki.keys import private_folder, write_private

UNFINISHED = "FEDREC_UNFINISHED"
"""Names in the environment the folder where an executor notes tasks that have not ended."""


class UnfinishedTasks:
    """The unfinished tasks of one executor.

    Args:
        folder: of their files, readable only by their owner, because they contain tokens; None:
            they are not kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else private_folder(folder)

    def add(self, task: Any) -> None:
        """Record a task that is being started."""
        if self._folder is not None:
            write_private(self._file(self._folder, task), json.dumps(asdict(task)))

    def remove(self, task: Any) -> None:
        """Delete a task that has ended."""
        if self._folder is not None:
            self._file(self._folder, task).unlink(missing_ok=True)

    def take(self) -> list[Any]:
        """Return and delete the tasks of an earlier executor; damaged files are omitted."""
        found = []
        for file in [] if self._folder is None else sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                found.append(SimpleNamespace(**read_json(file)))
            file.unlink(missing_ok=True)
        return found

    @staticmethod
    def _file(folder: Path, task: Any) -> Path:
        return folder / f"{task.task_id}.json"
