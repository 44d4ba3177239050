# SPDX-License-Identifier: Apache-2.0
"""The Ray engine: nodes are Ray actors, on this machine or on a Ray cluster.

On one machine without GPUs the first node is in this process, which would otherwise only wait while
nodes train: a third process for two nodes takes 250 MiB, and a second to start. On a cluster or
with GPUs every node is an actor, on the machine or GPU that Ray gives it.

A local Ray is restricted to its user; access to a cluster is decided by its owner. The data are
read once, before Ray is started, and put into Ray's object store, where all actors of a machine
share one copy. Parameters that several messages share are in shared memory on one machine and in
the object store on a cluster. Flower's own simulation is not used, because its dispatch time grows
with the number of registered nodes and of messages in flight.
"""

import functools
import importlib
import logging
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from flwr.app import Error, Message

from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import EngineError
from fedrec.protocol.messages import INITIAL
from fedrec.protocol.serialization import sent_bytes
from fedrec.runs.folder import RunFolder
from simulations.engines.grid import (
    CLIENT_RAISED,
    LocalGrid,
    NodeActor,
    SerialGrid,
    answer_or_error,
    contexts_of,
    index_of,
)
from simulations.engines.grid import open_grid as open_serial_grid
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
    """Token of this process: Ray reads it once, so a second local Ray must use that of the
    first."""
    return secrets.token_hex(_TOKEN_BYTES)


def settings_of_a_local_ray() -> dict[str, str]:
    """Environment variables of a local Ray's processes."""
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
    """Context manager of the environment in which a local Ray is started, used and stopped;
    restores the user's settings."""
    before = dict(os.environ)
    configured = _MODE in before or _TOKEN in before
    settings = settings_of_a_local_ray()
    for name, value in settings.items():
        if not configured or name not in (_MODE, _TOKEN):
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
    """Disable Ray's clusters in its constants, if Ray is already imported."""
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


def _has_token() -> bool:
    """Return True if this process's Ray authenticates by a token."""
    raylet: Any = importlib.import_module("ray._raylet")
    return raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN


# A local Ray is started without the processes that no run uses: the monitors of its autoscaler and
# its logs, the server of its dashboard, and the agents of the dashboard and of runtime
# environments.
#
# Each is a Python process of about 55 MiB, so with them two nodes take a quarter more memory. A
# raylet ends when one of its agents ends, so another program stands in for each and waits until the
# raylet closes its input. These are the only changes of Ray's modules; a test reports when a new
# version of Ray needs others.

_STAND_IN = 'sh -c "exec cat"'  # sh takes further arguments, such as Ray adds
_NOWHERE = "1"  # a port where nobody listens; with 0 the raylet would wait until its agent has one
_RAYLET = {
    "--dashboard_agent_command": _STAND_IN,
    "--runtime_env_agent_command": _STAND_IN,
    "--metrics-agent-port": _NOWHERE,
    "--metrics_export_port": _NOWHERE,
    "--runtime_env_agent_port": _NOWHERE,
    "--dashboard_agent_listen_port": _NOWHERE,
}


@contextmanager
def _few_processes() -> Iterator[None]:
    """A local Ray that is started in the block has no more processes than it needs: all of them if
    its workers are to run in an environment that an agent makes for them, as below `uv run`."""
    worker: Any = importlib.import_module("ray._private.worker")
    configured = worker.RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ
    if configured or worker._maybe_modify_runtime_env(None, False):
        yield
        return
    node: Any = importlib.import_module("ray._private.node").Node
    services: Any = importlib.import_module("ray._private.services")
    start = services.start_ray_process

    def started(command: list[str], kind: str, *more: Any, **named: Any) -> Any:
        if kind == "raylet":
            command = [part for part in command if part.partition("=")[0] not in _RAYLET]
            command += [f"{name}={value}" for name, value in _RAYLET.items()]
        return start(command, kind, *more, **named)

    unused = ("start_monitor", "start_log_monitor", "start_api_server")
    before = {name: getattr(node, name) for name in unused}
    for name in unused:
        setattr(node, name, lambda *_, **__: None)
    services.start_ray_process = started
    try:
        yield
    finally:
        services.start_ray_process = start
        for name, method in before.items():
            setattr(node, name, method)


_TRIES = 3  # per actor: one for a lost machine, one for another that is lost meanwhile
_PATIENCE = 120.0  # seconds per try; Ray declares a machine dead after some 20

log = logging.getLogger("fedrec")
_STARTS = 2  # of a local Ray, whose processes may start slowly on a busy machine
_INLINE = 2**16  # bytes; smaller records are sent with the call
# for parameters and replies in flight; by default Ray takes 30 % of the memory
_OBJECT_STORE_BYTES = 256 * 2**20


def started(
    actors: Mapping[int, Any], start: Callable[[int], Any], patience: float = _PATIENCE
) -> dict[int, Any]:
    """Wait until all actors have started, and return them by the index of their node.

    A cluster detects the loss of a machine by checks that fail for some seconds. Until then it
    still assigns actors to it; these never run, die when the machine is declared dead, and are
    started again here. An actor that died before it ran in the last try too, that failed while it
    started, or that has no core after `patience`, is returned as it is: a message to it is answered
    with Ray's error, or waits for the core.

    Args:
        actors: by the index of their node.
        start: starts the actor of the node with an index, without waiting for it.
        patience: seconds to wait for the actors in each try.
    """
    actors = dict(actors)
    starting = list(actors)
    for _ in range(_TRIES - 1):
        starting = _never_ran({index: actors[index] for index in starting}, patience)
        if not starting:
            break
        log.warning("Ray nodes %s died before they ran; restarting them", starting)
        actors |= {index: start(index) for index in starting}
    return actors


def _never_ran(actors: Mapping[int, Any], patience: float) -> list[int]:
    """Indices of the starting actors that died before they ran."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    ready = {actor.__ray_ready__.remote(): index for index, actor in actors.items()}
    lost = []
    for reference in ray.wait(list(ready), num_returns=len(ready), timeout=patience)[0]:
        try:
            ray.get(reference)
        except ActorDiedError as error:
            lost += [] if error.actor_init_failed else [ready[reference]]
        except RayError:
            continue
    return sorted(lost)


class RayGrid(LocalGrid):
    """Grid that sends messages to Ray actors.

    Args:
        nodes: number of nodes.
        start: starts the actor of the node with an index, without waiting for it.
        indices: of the nodes that have an actor.
        here: a grid of the same nodes in this process, for those without an actor.
        local: whether all actors run on this machine.
    """

    def __init__(
        self,
        nodes: int,
        start: Callable[[int], Any],
        indices: Iterable[int],
        here: SerialGrid,
        *,
        local: bool,
    ) -> None:
        super().__init__(nodes)
        self._start = start
        self._actors = {index: start(index) for index in indices}
        self._started = False
        self._here = here
        self._local = local
        self._thread = ThreadPoolExecutor(1, "fedrec-node")  # one message at a time
        self._pending: dict[Future[Message], Message] = {}

    def actors(self) -> dict[int, Any]:
        """Return the actors by node index; the first call waits until they have started."""
        if not self._started:
            self._actors = started(self._actors, self._start)
            self._started = True
        return self._actors

    def close(self) -> None:
        """End all actors, so that a Ray that keeps running has their cores for the next run."""
        import ray

        self._thread.shutdown(wait=False, cancel_futures=True)
        for actor in self._actors.values():
            ray.kill(actor)

    def share(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Put parameters where the nodes can read them without a copy; here, shared memory of this
        machine. Other machines of a cluster get copies."""
        return super().share(arrays) if self._local else dict(arrays)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies, see `Grid.send_and_receive`. Requests for initial
        parameters are answered in this process, because all nodes return the same."""
        messages = list(messages)
        if [message.metadata.message_type for message in messages] == [INITIAL]:
            return self._here.send_and_receive(messages, timeout=timeout)
        self.actors()  # not part of the time that nodes have to reply
        return super().send_and_receive(messages, timeout=timeout)

    def _submit(self, batch: list[Message]) -> None:
        actors = self.actors()
        stored: dict[int, Any] = {}
        # messages to this process last, because it then trains
        for message in sorted(batch, key=lambda message: index_of(message) not in actors):
            actor = actors.get(index_of(message))
            if actor is None:
                answer = self._thread.submit(answer_or_error, message, self._here.answer)
            else:
                answer = _sent(actor, message, stored)
            self._pending[answer] = message

    def _collect(self, message_ids: set[str], timeout: float | None) -> list[Message]:
        left = {
            answer
            for answer, message in self._pending.items()
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

    def _reply(self, answer: Future[Message]) -> Message:
        from ray.exceptions import RayError

        message = self._pending.pop(answer)
        try:
            return answer.result()
        except RayError as error:
            return Message(Error(CLIENT_RAISED, _reason_of(error)), reply_to=message)


def _sent(actor: Any, message: Message, stored: dict[int, Any]) -> Future[Message]:
    """Send a message to an actor. Large records of arrays go through Ray's object store, once for
    all messages that share them; `stored` has their references by the record's `id`.

    The rest is pickled here, because Ray's own serialisation, which also handles objects that other
    processes cannot import, takes twice as long.
    """
    import ray

    content = dict(message.content)
    large = {
        name: record
        for name, record in message.content.array_records.items()
        if sent_bytes(record) > _INLINE
    }
    for name, record in large.items():
        del content[name]
        if id(record) not in stored:
            stored[id(record)] = ray.put(record)
    references = [stored[id(record)] for record in large.values()]
    packed = pickle.dumps((message.metadata, content), protocol=pickle.HIGHEST_PROTOCOL)
    return actor.handle.remote(packed, list(large), *references).future()


def _reason_of(error: Any) -> str:
    """Describe Ray's error, with a fix if a process was killed."""
    from ray.exceptions import ActorDiedError, OutOfMemoryError, WorkerCrashedError

    text = f"{type(error).__name__}: {error}"
    killed = isinstance(error, ActorDiedError) and not error.actor_init_failed
    if not killed and not isinstance(error, OutOfMemoryError | WorkerCrashedError):
        return text
    return EngineError(
        "the process of this node was killed",
        got=text,
        fix="if memory or /dev/shm is full, free some, or set fewer engine.nodes or a smaller"
        " engine.memory-gib; then fedrec resume",
    ).text()


@contextmanager
def open_grid(run: RunFolder) -> Iterator[RayGrid]:
    """Open the grid of a run; a local Ray is started for it and stopped after it, a cluster is left
    running.

    Raises:
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    engine = run.experiment.engine
    population = POPULATIONS.population(run.experiment)
    with connected(engine.ray_address, engine.actors, _bytes_of(population)) as ours:
        import ray

        local = ours and engine.ray_address is None
        if local and not _has_token():
            log.warning(
                "Ray's token authentication is off: other users of this machine may be able to"
                " connect to the Ray that is started now"
            )
        try:
            reference = _stored(population)
            del population
            POPULATIONS.hold(run.experiment, ray.get(reference))  # this process shares that copy
            yield from _grid(run, reference)
        finally:
            if not local:
                # An object store that outlives this process reuses the memory for other objects.
                POPULATIONS.drop(run.experiment)


@contextmanager
def connected(address: str | None, cores: int, data_bytes: int = 0) -> Iterator[bool]:
    """Context with Ray: the cluster at an address, or a local Ray, which is ended if it is ours.

    Args:
        address: address of a cluster; None: start a local Ray.
        cores: cores of a local Ray.
        data_bytes: size of the data in its object store.

    Yields:
        Whether this process had no Ray before.
    """
    disable_telemetry(os.environ)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with alone() if address is None else nullcontext():
        import ray

        ours = not ray.is_initialized()
        connect(address, cores, data_bytes)
        try:
            yield ours
        finally:
            if ours:
                ray.shutdown()


def _grid(run: RunFolder, population: Any) -> Iterator[RayGrid]:
    """Open the grid of a run whose data are in Ray's object store."""
    import ray

    engine = run.experiment.engine
    nodes = engine.nodes or 1
    gpus = ray.cluster_resources().get("GPU", 0.0) if engine.device.startswith("cuda") else 0.0
    remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / nodes), max_restarts=0)(NodeActor)
    contexts = contexts_of(run.experiment.model_dump_json(), str(run.path), nodes)
    with open_serial_grid(run) as here:
        grid = RayGrid(
            nodes,
            lambda index: remote.remote(contexts[index], population),
            range(nodes - engine.actors, nodes),
            here,
            local=engine.ray_address is None,
        )
        try:
            yield grid
        finally:
            grid.close()


def _bytes_of(population: Population) -> int:
    """Size of a population in the object store."""
    arrays: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(population, protocol=5, buffer_callback=arrays.append)
    return len(rest) + sum(array.raw().nbytes for array in arrays)


def _stored(population: Population) -> Any:
    """Put a population into Ray's object store, and return its reference.

    Raises:
        EngineError: the object store is full.
    """
    import ray
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        return ray.put(population)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise EngineError(
            "Ray's object store is too small for the data of this run",
            got=f"{type(error).__name__}: {error}",
            fix="remove files from /dev/shm, or give it more (docker run --shm-size), then fedrec"
            " resume; --engine serial needs none",
        ) from None


def connect(address: str | None, actors: int, data_bytes: int) -> None:
    """Join the Ray cluster at an address, or start a local Ray with a core for each of `actors`.

    Raises:
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    import ray

    quiet: Any = {"log_to_driver": False, "logging_level": "ERROR", "ignore_reinit_error": True}
    local = {
        "address": "local",  # otherwise Ray would join a cluster that runs on this machine
        "num_cpus": actors,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES + data_bytes,
    }
    ours = not ray.is_initialized()
    trouble = ""
    for _ in range(1 if address else _STARTS):
        try:
            with nullcontext() if address else _few_processes():
                ray.init(**({"address": address} if address else local), **quiet)
            return
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if ours:
                ray.shutdown()  # of what was started
    raise EngineError(
        f"the Ray cluster at {address!r} cannot be reached" if address else "Ray cannot be started",
        got=trouble,
        fix="use --engine serial, which runs without Ray",
    )
