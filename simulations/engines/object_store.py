# SPDX-License-Identifier: Apache-2.0
"""Ray's object store, as the process that runs the server puts objects into it.

A local Ray keeps it in `/dev/shm` if that had room for it when Ray was started. Its pages are taken
when they are first written, so that others may have filled `/dev/shm` by then. The kernel then ends
the process that writes (SIGBUS), which no Python code can catch; so the room is checked before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fedrec.errors import EngineError

SHARED_MEMORY = Path("/dev/shm")
_MIB = 2**20


class ObjectStore:
    """Where objects for the nodes are put.

    Args:
        size: bytes of a local Ray that is to be started; None for a Ray of somebody else, of whose
            store nothing is known.
    """

    def __init__(self, size: int | None) -> None:
        # Ray's own rule
        self._in_memory = size is not None and SHARED_MEMORY.is_dir() and _free() >= size

    def put(self, value: object, size: int) -> Any:
        """Ray's reference of an object of about so many bytes.

        Raises:
            EngineError: there is no room for it.
        """
        import ray
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        if self._in_memory and _free() < size:
            raise _full(size, f"{_free() / _MIB:.1f} MiB free in {SHARED_MEMORY}")
        try:
            return ray.put(value)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise _full(size, f"{type(error).__name__}: {error}") from None


def _free() -> int:
    return shutil.disk_usage(SHARED_MEMORY).free


def _full(size: int, got: str) -> EngineError:
    return EngineError(
        "Ray's object store has no room for the data of this run",
        expected=f"{size / _MIB:.1f} MiB",
        got=got,
        fix=f"remove files from {SHARED_MEMORY}, or give it more (docker run --shm-size), then"
        " fedrec resume; --engine serial needs none",
    )
