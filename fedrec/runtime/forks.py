# SPDX-License-Identifier: Apache-2.0
"""Forks of this process that exit without the parent's exit handlers."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a fork, which ends after it; the status is 0, or what `SystemExit` says, or 1
    after an error.

    Returns:
        The fork's process id.
    """
    child = os.fork()
    if not child:
        _end_after(work)
    return child


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
