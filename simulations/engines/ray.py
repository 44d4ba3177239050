# SPDX-License-Identifier: Apache-2.0
"""The Ray engine: nodes are Ray actors, on this machine or on a Ray cluster.

On one machine without GPUs the first node is in this process, which would otherwise only wait while
nodes train: a third process for two nodes takes 250 MiB, and a second to start. On a cluster or
with GPUs every node is an actor, on the machine or GPU that Ray gives it.

A local Ray is restricted to its user, see `simulations.engines.ray`; access to a cluster is
decided by its owner. The data are read once, before Ray is started, and put into Ray's object
store, where all actors of a machine share one copy. Parameters that several messages share are in
shared memory on one machine and in the object store on a cluster. Flower's own simulation is not
used, because its dispatch time grows with the number of registered nodes and of messages in flight.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np
from flwr.app import Error, Message, RecordDict

from fedrec.data.population import POPULATIONS
from fedrec.errors import EngineError
from fedrec.protocol.messages import INITIAL
from fedrec.protocol.serialization import sent_bytes
from fedrec.runs.folder import RunFolder
from simulations.engines import reply_buffers, serial
from simulations.engines.grid import CLIENT_RAISED, FIRST_NODE_ID, LocalGrid, contexts_of, place_of
from simulations.engines.process_groups import few_processes
from simulations.engines.ray_node import Answer, NodeActor
from simulations.engines.serial import NodeThread, SerialGrid
from simulations.engines.shared_population import ObjectStore, share, shared_bytes
from simulations.flower_commands import disable_telemetry

# Restricts a local Ray to its user: it listens on loopback, and its processes authenticate by a
# token. It collects no metrics, and its nodes have this process's priority.
#
# By default Ray listens on all interfaces without authentication: anyone who reaches its port can
# run code as the user who started it. The token is only in the environment of Ray's processes,
# which other users cannot read. These settings apply to a local Ray only; a cluster is joined with
# the user's settings.

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_METRICS = "RAY_enable_metrics_collection"
_NICENESS = "RAY_worker_niceness"
_TOKEN_BYTES = 32


@functools.cache
def _token() -> str:
    """The token of this process: Ray reads it once, so a second local Ray must use that of the
    first."""
    return secrets.token_hex(_TOKEN_BYTES)


def settings_of_a_local_ray() -> dict[str, str]:
    """Environment variables of Ray's processes."""
    return {
        # without clusters Ray takes 127.0.0.1 for the machine's address, on Linux too
        _LOOPBACK: "0",
        _MODE: "token",
        _TOKEN: _token(),
        _METRICS: "0",  # which it would offer at a port
        # by default other processes come before the nodes, and a round waits for the last node
        _NICENESS: "0",
    }


@contextmanager
def alone() -> Iterator[None]:
    """The environment in which a local Ray is started, used and stopped; the user's own settings
    are kept."""
    before = dict(os.environ)
    given = _MODE in before or _TOKEN in before
    settings = settings_of_a_local_ray()
    for name, value in settings.items():
        if not given or name not in (_MODE, _TOKEN):
            os.environ.setdefault(name, value)
    _authentication_is_read_again()
    try:
        with _seen_by_ray():
            yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        _authentication_is_read_again()


@contextmanager
def _seen_by_ray() -> Iterator[None]:
    """Ray reads its address when it is imported, which may have happened before."""
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if constants is None or os.environ[_LOOPBACK] != "0":
        yield
        return
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _authentication_is_read_again() -> None:
    """Make Ray read its authentication mode and token from the environment.

    It reads them when it is imported, which may have happened before. If it then starts a local Ray
    that requires a token, it cannot connect to it. A Ray that runs keeps what it has.
    """
    raylet: Any = sys.modules.get("ray._raylet")
    if raylet is None or sys.modules["ray"].is_initialized():
        return
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


def has_token() -> bool:
    """Whether this process's Ray authenticates by a token."""
    raylet: Any = importlib.import_module("ray._raylet")
    return raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN


# Starts the actors of a Ray grid, and restarts those that died before they ran.
#
# A cluster detects the loss of a machine by checks that fail for some seconds. Until then it still
# places actors there; these never run, and die when the machine is declared dead.

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


log = logging.getLogger("fedrec")
_INLINE = 2**16  # bytes; smaller arrays are sent with the call
# of a local Ray, whose processes may start slowly on a busy machine: with few of them, then all
_STARTS = (True, False)
# GiB for parameters in flight; by default Ray takes 30 % of the memory
_OBJECT_STORE_BYTES = 256 * 2**20


class RayGrid(LocalGrid):
    """Sends messages to actors.

    Args:
        nodes: number of nodes.
        placement: the actors, which may still be starting.
        here: a grid of the same nodes in this process.
        thread: answers for nodes without an actor.
        store: where large arrays are put.
        local: whether all actors run on this machine.
    """

    def __init__(
        self,
        nodes: int,
        placement: Placement,
        here: SerialGrid,
        thread: NodeThread,
        store: ObjectStore,
        *,
        local: bool,
    ) -> None:
        super().__init__(nodes)
        self._placement = placement
        self._store = store
        self._here = here
        self._local = local
        self._thread = thread
        self._pending: dict[Future[Answer], tuple[Message, reply_buffers.ReplyBuffer | None]] = {}
        self._pool = reply_buffers.BufferPool()

    def share(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same parameters where the nodes can read them without a copy; here, shared memory of
        this machine. Other machines of a cluster get copies."""
        return super().share(arrays) if self._local else dict(arrays)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies, see `Grid.send_and_receive`. Requests for initial
        parameters are answered in this process, because all nodes return the same."""
        messages = list(messages)
        if [message.metadata.message_type for message in messages] == [INITIAL]:
            return self._here.send_and_receive(messages, timeout=timeout)
        self._placement.started()  # not part of the time that nodes have to reply
        return super().send_and_receive(messages, timeout=timeout)

    def _submit(self, batch: list[Message]) -> None:
        actors = self._placement.started()
        stored: dict[int, Any] = {}
        # those to this process at last, because it then works
        for message in sorted(batch, key=lambda one: place_of(one) not in actors):
            actor = actors.get(place_of(message))
            if actor is None:
                self._pending[self._thread.send(message)] = message, None
            else:
                self._submit_to(actor, message, stored)

    def _submit_to(self, actor: Any, message: Message, stored: dict[int, Any]) -> None:
        """Send a message to an actor; `stored` has what is in the object store, by record."""
        records = message.content.array_records
        arrays = {
            name: own
            for name, own in records.items()
            if not self._local or sent_bytes(own) > _INLINE
        }
        for record in arrays.values():
            if id(record) not in stored:
                stored[id(record)] = self._store.put(record, sent_bytes(record))
        shared = [stored[id(record)] for record in arrays.values()]
        buffer = self._pool.buffer(message.content) if self._local else None
        packed = _packed(message, list(arrays), None if buffer is None else buffer.assign())
        self._pending[actor.handle.remote(packed, *shared).future()] = message, buffer

    def _collect(self, message_ids: set[str], timeout: float | None) -> list[Message]:
        left = {
            answer
            for answer, (message, _) in self._pending.items()
            if message.metadata.message_id in message_ids
        }
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while left:  # one at a time, so that replies are unpacked while slower nodes still train
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, left = wait(left, rest, FIRST_COMPLETED)
            if not done:
                break
            replies += [self._reply(answer) for answer in done]
        return replies

    def _reply(self, sent: Future[Answer]) -> Message:
        from ray.exceptions import RayError

        message, buffer = self._pending.pop(sent)
        try:
            answer = sent.result()
        except RayError as error:
            if buffer is not None:
                buffer.take_back({})  # its node has failed, or is done
            return Message(Error(CLIENT_RAISED, _reason_of(error)), reply_to=message)
        if buffer is not None:
            for name, record in buffer.take_back(answer.spots).items():
                answer.message.content[name] = record
        return answer.message


def _reason_of(error: Any) -> str:
    """The text of Ray's error, and what to do if a process was killed."""
    from ray.exceptions import ActorDiedError, OutOfMemoryError, WorkerCrashedError

    text = f"{type(error).__name__}: {error}"
    killed = isinstance(error, ActorDiedError) and not error.actor_init_failed
    if not killed and not isinstance(error, OutOfMemoryError | WorkerCrashedError):
        return text
    return EngineError(
        "the process of this node was killed",
        got=text,
        fix="if memory or /dev/shm is full, free some, or take fewer nodes (engine.nodes) or less"
        " engine.memory-gib; then fedrec resume",
    ).text()


def _packed(message: Message, without: list[str], memory: reply_buffers.Place | None) -> bytes:
    """Metadata and content of a message, the names of the records that were taken out, and memory
    for its reply.

    Ray's own serialisation takes twice as long, because it also handles objects that other
    processes cannot import.
    """
    rest = RecordDict(
        {name: record for name, record in message.content.items() if name not in without}
    )
    return pickle.dumps((message.metadata, rest, without, memory), protocol=pickle.HIGHEST_PROTOCOL)


@contextmanager
def open_grid(run: RunFolder) -> Iterator[RayGrid]:
    """The grid of a run; a local Ray is started for it and stopped after it, a cluster is left
    running.

    Raises:
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    disable_telemetry(os.environ)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with alone() if run.experiment.engine.ray_address is None else nullcontext():
        yield from _opened(run)


def _opened(run: RunFolder) -> Iterator[RayGrid]:
    import ray

    engine = run.experiment.engine
    nodes = engine.nodes or 1
    ours = not ray.is_initialized()
    local = engine.ray_address is None
    started = ours and local
    data_bytes = shared_bytes(POPULATIONS.population(run.experiment))
    store = ObjectStore(_OBJECT_STORE_BYTES + data_bytes if started else None)
    connect(engine.ray_address, engine.actors, data_bytes)
    if started and not has_token():
        log.warning(
            "Ray's token authentication is off: other users of this machine may be able to connect"
            " to the Ray that is started now"
        )
    try:
        gpus = ray.cluster_resources().get("GPU", 0.0) if engine.device.startswith("cuda") else 0.0
        remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / nodes), max_restarts=0)(NodeActor)
        configs = contexts_of(run.experiment.model_dump_json(), str(run.path), nodes)
        population = share(run.experiment, store)
        placement = Placement(
            lambda place: remote.remote(FIRST_NODE_ID + place, *configs[place], tuple(population)),
            range(nodes - engine.actors, nodes),
        )
        try:
            with serial.open_grid(run) as here, closing(NodeThread(here.answer)) as thread:
                yield RayGrid(nodes, placement, here, thread, store, local=local)
        finally:
            placement.stop()
    finally:
        if not ours or not local:
            # An object store that outlives this process reuses the memory for other objects.
            POPULATIONS.drop(run.experiment)
        if ours:
            ray.shutdown()


def connect(address: str | None, actors: int, data_bytes: int) -> None:
    """Join the Ray cluster at an address, or start a local Ray with a core for each of `actors`.

    Raises:
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    import ray

    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "ignore_reinit_error": True,
    }
    local = {
        "address": "local",  # otherwise Ray would join a cluster that runs on this machine
        "num_cpus": actors,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES + data_bytes,
    }
    trouble = ""
    ours = not ray.is_initialized()
    for few in (False,) if address else _STARTS:
        try:
            with few_processes() if few else nullcontext():
                ray.init(**({"address": address} if address else local), **quiet)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if ours:
                ray.shutdown()  # of what was started
        else:
            return
    raise EngineError(
        (
            "Ray cannot be started"
            if address is None
            else f"the Ray cluster at {address!r} cannot be reached"
        ),
        expected="a local Ray" if address is None else "a running Ray cluster of the same version",
        got=trouble,
        fix="--engine serial runs without Ray",
    )
