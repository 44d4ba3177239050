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
from fedrec.data.population import Population, reader_of
from fedrec.data.reader import data_directory
from fedrec.experiment.tables import DataSettings

_MOST = 2  # populations in the cache
FileStamp = tuple[str, int, int, int]
"""Path, size in bytes, time of the last change in nanoseconds, and inode of a file."""


class PopulationCache:
    """A cache of a few populations; the least recently used one is dropped first."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Population] = OrderedDict()
        self._read: dict[str, tuple[FileStamp, ...]] = {}  # the files that were read, by key

    def population(self, settings: DataSettings) -> Population:
        """The population of these settings; read if it is not cached.

        Raises:
            DataError: the dataset is missing or damaged.
        """
        key = _key(settings)
        if key not in self._held:
            self._read[key] = _stamps(settings)
            self.hold(settings, Population.of(settings))
        self._held.move_to_end(key)
        return self._held[key]

    def cached(self, settings: DataSettings) -> Population | None:
        """The population of these settings, if it is cached; nothing is read."""
        return self._held.get(_key(settings))

    def take(self, settings: DataSettings) -> Population:
        """The population of these settings, no longer cached, for a caller who stores another copy
        of it."""
        return self._held.pop(_key(settings))

    def hold(self, settings: DataSettings, population: Population) -> None:
        """Store a population that was read elsewhere."""
        self._held[_key(settings)] = population
        while len(self._held) > _MOST:
            self._read.pop(self._held.popitem(last=False)[0], None)

    def drop(self, settings: DataSettings) -> None:
        """Remove the population of these settings from the cache."""
        key = _key(settings)
        self._held.pop(key, None)
        self._read.pop(key, None)

    def renew(self, settings: DataSettings) -> None:
        """Remove the population of these settings if this process read it from files that have
        changed since."""
        read = self._read.get(_key(settings))
        if read is not None and read != _stamps(settings):
            self.drop(settings)


POPULATIONS = PopulationCache()


def _key(settings: DataSettings) -> str:
    """The cache key: everything that a population depends on, and the location of its data."""
    parts = settings.model_dump(mode="json", include=set(DataSettings.model_fields))
    return json.dumps([parts, str(data_directory())], sort_keys=True)


def _stamps(settings: DataSettings) -> tuple[FileStamp, ...]:
    """The files that a dataset is read from; empty for generated data."""
    reader = resolve(DATASET, settings.dataset.name)
    with component_errors(DATASET.name, reader, "when its files were looked for"):
        files = reader_of(settings).every_file()
    found = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
