# SPDX-License-Identifier: Apache-2.0
"""The populations of this process: read once, or received from another process of the run.

While a run goes on its population stays the same; what begins anew calls `renew` first, so that
data rewritten in between are read again.
"""

from __future__ import annotations

import json
from collections import OrderedDict

from fedrec.components.errors import component_errors
from fedrec.components.registry import DATASET, resolve
from fedrec.data.population import Population
from fedrec.data.reader import data_directory
from fedrec.experiment.schema import Experiment
from fedrec.runtime.heap import release_free_heap

_MOST = 2  # populations in the cache
FileStamp = tuple[str, int, int, int]
"""Path, size in bytes, time of the last change in nanoseconds, and inode of a file."""


class PopulationCache:
    """A cache of a few populations; the least recently used one is dropped first."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Population] = OrderedDict()
        self._read: dict[str, tuple[FileStamp, ...]] = {}  # the files that were read, by key

    def population(self, experiment: Experiment) -> Population:
        """The population of an experiment; read if it is not cached.

        Raises:
            DataError: the dataset is missing or damaged.
        """
        key = _key(experiment)
        if key not in self._held:
            self._read[key] = _stamps(experiment)
            self.hold(experiment, Population.of(experiment))
            release_free_heap()  # reading needs much more memory than the result
        self._held.move_to_end(key)
        return self._held[key]

    def cached(self, experiment: Experiment) -> Population | None:
        """The population of an experiment, if it is cached; nothing is read."""
        return self._held.get(_key(experiment))

    def hold(self, experiment: Experiment, population: Population) -> None:
        """Store a population that was read elsewhere."""
        self._held[_key(experiment)] = population
        while len(self._held) > _MOST:
            self._read.pop(self._held.popitem(last=False)[0], None)

    def drop(self, experiment: Experiment) -> None:
        """Remove the population of an experiment from the cache."""
        key = _key(experiment)
        self._held.pop(key, None)
        self._read.pop(key, None)

    def renew(self, experiment: Experiment) -> None:
        """Remove the population of an experiment if this process read it from files that have
        changed since."""
        read = self._read.get(_key(experiment))
        if read is not None and read != _stamps(experiment):
            self.drop(experiment)


POPULATIONS = PopulationCache()


def _key(experiment: Experiment) -> str:
    """The cache key: everything that a population depends on, and the location of its data."""
    table = experiment.table()
    parts = {
        name: table.get(name)
        for name in ("dataset", "split", "seed", "task", "positive-above", "perturb")
    }
    return json.dumps([parts, str(data_directory())], sort_keys=True)


def _stamps(experiment: Experiment) -> tuple[FileStamp, ...]:
    """The files that the dataset of an experiment is read from; empty for generated data."""
    reader = resolve(DATASET, experiment.dataset.name)
    with component_errors(DATASET.name, reader, "when its files were looked for"):
        files = reader(experiment.dataset.name, experiment.settings(DATASET)).files()
    found = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
