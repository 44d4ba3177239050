# SPDX-License-Identifier: Apache-2.0
"""All clients' data in Ray's object store, once per machine.

They are put there array by array, each of which this process then no longer holds, so that a large
dataset is in memory once and not twice while a run starts.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np

from fedrec.data.cache import POPULATIONS
from fedrec.data.population import Population
from fedrec.experiment.tables import DataSettings
from simulations.engines.object_store import ObjectStore


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
