# SPDX-License-Identifier: Apache-2.0
"""Actors that die while they start, on a local Ray."""

import time

import pytest

from simulations.engines.placement import Placement
from simulations.engines.ray import connect
from simulations.engines.ray_alone import alone

pytestmark = pytest.mark.timeout(120)


def answering(error=None):
    """The class of an actor that answers, or fails in its constructor. Defined in a function,
    because Ray's processes cannot import this file."""

    class Answering:
        def __init__(self):
            if error is not None:
                raise error

        def ping(self):
            return "here"

    return Answering


@pytest.fixture(scope="module")
def ray():
    with alone():
        import ray

        connect(None, 3, 0)
        yield ray
        ray.shutdown()


class Starter:
    """Starts actors, and kills those at the places in `victims` immediately, the given number of
    times."""

    def __init__(self, ray, victims, error=None):
        self.ray, self.victims, self.started = ray, dict(victims), []
        self.actor = ray.remote(num_cpus=0)(answering(error))

    def __call__(self, place):
        actor = self.actor.remote()
        self.started.append(place)
        if self.victims.get(place, 0):
            self.victims[place] -= 1
            self.ray.kill(actor)
        return actor


@pytest.mark.slow
def test_an_actor_that_died_before_it_ran_is_started_again(ray):
    start = Starter(ray, {1: 2})
    placement = Placement(start, range(3))
    actors = placement.started()
    assert ray.get([actor.ping.remote() for actor in actors.values()]) == ["here"] * 3
    assert start.started == [0, 1, 2, 1, 1]


def test_tries_are_bounded(ray):
    start = Starter(ray, {0: 9})
    (actor,) = Placement(start, range(1)).started().values()
    assert start.started == [0, 0, 0]
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.ping.remote())


def test_an_actor_whose_constructor_failed_is_not_restarted(ray):
    start = Starter(ray, {}, ValueError("no such module"))
    (actor,) = Placement(start, range(1)).started().values()
    assert start.started == [0]
    with pytest.raises(ray.exceptions.ActorDiedError, match="no such module"):
        ray.get(actor.ping.remote())


@pytest.mark.slow
def test_an_actor_that_dies_later_is_not_started_again(ray):
    start = Starter(ray, {})
    placement = Placement(start, range(1))
    (actor,) = placement.started().values()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.ActorDiedError):
        for _ in range(200):  # it may answer once more: `kill` does not wait for the end
            ray.get(actor.ping.remote())
            time.sleep(0.05)
    assert placement.started() == {0: actor} and start.started == [0]


def test_an_actor_without_a_core_is_waited_for_with_patience(ray):
    def start(place):
        return ray.remote(num_cpus=99)(answering()).remote()

    assert len(Placement(start, range(1), patience=0.2).started()) == 1
