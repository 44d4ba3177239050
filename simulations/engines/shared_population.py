# SPDX-License-Identifier: Apache-2.0
"""All clients' data in Ray's object store."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import EngineError
from fedrec.experiment.tables import DataSettings

# Ray's object store, as the process that runs the server puts objects into it.
#
# A local Ray keeps it in `/dev/shm` if that had room for it when Ray was started. Its pages are
# taken when they are first written, so that others may have filled `/dev/shm` by then. The kernel
# then ends the process that writes (SIGBUS), which no Python code can catch; so the room is checked
# before.

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


# All clients' data in Ray's object store, once per machine.
#
# They are put there array by array, each of which this process then no longer holds, so that a
# large dataset is in memory once and not twice while a run starts.


class SharedPopulation(NamedTuple):
    """Where a population is in the object store.

    Attributes:
        rest: reference of its pickle without arrays.
        arrays: references of their bytes.
    """

    rest: Any
    arrays: tuple[Any, ...]

    def get(self) -> Population:
        """The population; its arrays are those of the object store."""
        import ray

        return pickle.loads(ray.get(self.rest), buffers=ray.get(list(self.arrays)))


def share(settings: DataSettings, store: ObjectStore) -> SharedPopulation:
    """Move the population of these settings into the object store; this process has it from there
    from now on.

    Raises:
        EngineError: it does not fit.
    """
    rest, arrays = _parts(POPULATIONS.take(settings))
    places = []
    while arrays:
        array = np.frombuffer(arrays.pop(0).raw(), dtype=np.uint8)
        places.append(store.put(array, array.nbytes))
    shared = SharedPopulation(store.put(rest, len(rest)), tuple(places))
    POPULATIONS.hold(settings, shared.get())
    return shared


def shared_bytes(population: Population) -> int:
    """Size of a population in the object store."""
    rest, arrays = _parts(population)
    return len(rest) + sum(array.raw().nbytes for array in arrays)


def _parts(population: Population) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Its pickle without arrays, and these."""
    arrays: list[pickle.PickleBuffer] = []
    return pickle.dumps(population, protocol=5, buffer_callback=arrays.append), arrays
