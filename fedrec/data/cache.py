# SPDX-License-Identifier: Apache-2.0
"""The populations of this process: read once, or received from another process of the run."""

from __future__ import annotations

import json
from collections import OrderedDict

from fedrec.data.population import Population
from fedrec.data.reader import data_directory
from fedrec.experiment.schema import Experiment
from fedrec.runtime.heap import release_free_heap

_MOST = 2  # populations in the cache


class Kept:
    """A cache of a few populations; the least recently used one is dropped first."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Population] = OrderedDict()

    def population(self, experiment: Experiment) -> Population:
        """The population of an experiment; read if it is not cached.

        Raises:
            DataError: the dataset is missing or damaged.
        """
        key = _key(experiment)
        if key not in self._held:
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
            self._held.popitem(last=False)

    def drop(self, experiment: Experiment) -> None:
        """Remove the population of an experiment from the cache."""
        self._held.pop(_key(experiment), None)


KEPT = Kept()


def _key(experiment: Experiment) -> str:
    """The cache key: everything that a population depends on, and the location of its data."""
    table = experiment.table()
    parts = {
        name: table.get(name)
        for name in ("dataset", "split", "seed", "task", "positive-above", "perturb")
    }
    return json.dumps([parts, str(data_directory())], sort_keys=True)
