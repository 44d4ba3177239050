# SPDX-License-Identifier: Apache-2.0
"""Forks of this process that exit without the parent's exit handlers."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class Fork:
    """A fork of this process that does some work and ends; its status is 0, or what `SystemExit`
    says, or 1 after an error.

    Args:
        work: what it does.

    Attributes:
        pid: its process id.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.pid = os.fork()
        if not self.pid:
            _end_after(work)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its status, negative the signal that ended it; None while it runs."""
        if self._code is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                ended = self.pid
                status = 0
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


def _end_after(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # The parent's resources are not closed here, because its connections are shared.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
