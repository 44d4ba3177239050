# SPDX-License-Identifier: Apache-2.0
"""Starts the actors of a Ray grid, and restarts those that died before they ran.

A cluster detects the loss of a machine by checks that fail for some seconds. Until then it still
places actors there; these never run, and die when the machine is declared dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("fedrec")
_TRIES = 3  # per actor: one for a lost machine, one for another that is lost meanwhile
_PATIENCE = 120.0  # seconds per try; Ray declares a machine dead after some 20


class Placement:
    """The actors of a run.

    Args:
        start: starts the actor of the node at a place, without waiting for it.
        places: of the nodes that have an actor.
        tries: largest number of starts per actor.
        patience: seconds to wait for the actors in each try.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        places: Iterable[int],
        tries: int = _TRIES,
        patience: float = _PATIENCE,
    ) -> None:
        self._start = start
        self.actors = {place: start(place) for place in places}
        self._starting = list(self.actors)
        self._tries = tries
        self._patience = patience

    def started(self) -> dict[int, Any]:
        """The actors by the place of their node, once all have started.

        The first call waits, later ones do not. An actor that died before it ran in the last try
        too, that failed while it started, or that has no core after `patience`, stays here:
        a message to it is answered with Ray's error, or waits for the core.
        """
        for _ in range(self._tries - 1):
            self._starting = self._died_before_they_ran()
            if not self._starting:
                break
            log.warning("Ray nodes %s died before they ran; restarting them", self._starting)
            for place in self._starting:
                self.actors[place] = self._start(place)
        self._starting = []
        return self.actors

    def stop(self) -> None:
        """End all actors, so that a Ray that stays has their cores for the next run."""
        import ray

        for actor in self.actors.values():
            ray.kill(actor)

    def _died_before_they_ran(self) -> list[int]:
        """Places of the starting actors that died before they ran."""
        import ray

        ready = {self.actors[place].__ray_ready__.remote(): place for place in self._starting}
        if not ready:
            return []
        known, _ = ray.wait(list(ready), num_returns=len(ready), timeout=self._patience)
        return sorted(ready[ref] for ref in known if _never_ran(ref))


def _never_ran(ready: Any) -> bool:
    """Whether the actor whose first task this is died before it ran."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    try:
        ray.get(ready)
    except ActorDiedError as error:
        return not error.actor_init_failed
    except RayError:
        return False
    return False
