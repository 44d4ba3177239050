# SPDX-License-Identifier: Apache-2.0
"""A job: the smallest unit that a study runs, skips when it is done, and repeats when it failed."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from fedrec.errors import DataError, EngineError, FedrecError, RunError
from server.callbacks.base import Callback


class Job(ABC):
    """One unit of work, in a folder of its own. Jobs are sent to other processes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique in its study."""

    @property
    @abstractmethod
    def run_path(self) -> Path:
        """The run folder that it writes, from which its rounds are read."""

    @abstractmethod
    def perform(self, callbacks: Sequence[Callback]) -> None:
        """Do the work, or what is left of it.

        Args:
            callbacks: of the run.

        Raises:
            FedrecError: something that the user can fix.
        """

    def attempt(self, callbacks: Sequence[Callback]) -> str | None:
        """Do the work, so that other jobs go on if it fails.

        Returns:
            The error with which it ended, None if it finished.

        Raises:
            FedrecError: data, engine or disk are at fault, which affects all jobs.
        """
        try:
            self.perform(callbacks)
        except (DataError, EngineError, RunError):
            raise
        except FedrecError as error:
            return error.text()
        except Exception as error:  # of a plug-in; its traceback is kept
            logging.getLogger("fedrec").warning("%s: %s", self.name, traceback.format_exc())
            return f"{type(error).__name__}: {error}"
        return None
