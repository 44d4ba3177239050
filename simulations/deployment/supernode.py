# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperNode and executors with our patches: sleep times, heartbeats, own code, a reply to
every message, tasks in forks, and many pieces of a message in one call."""

import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.supercore import heartbeat
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supernode.nodestate import nodestate_factory

from fedrec import __version__
from fedrec.errors import ClientError, FedrecError
from fedrec.protocol.serialization import PackedArray, opened, packed
from fedrec.runtime.process import Backoff, Fork
from simulations import flower_commands
from simulations.deployment.processes import REFUSED

# Sleep times of Flower's polling loops.
#
# Missing in Flower: settings for them. A SuperNode polls every 3 s, and looks for a reply every .5
# s.


class _PacedTime:
    """Replacement of the module `time` in one of Flower's loops.

    Args:
        pace: maps the loop's sleep time to the actual one, in seconds.
    """

    def __init__(self, pace: Callable[[float], float]) -> None:
        self._pace = pace

    def sleep(self, seconds: float) -> None:
        """Sleep for the mapped time."""
        time.sleep(self._pace(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


FLOWER_POLL = 3.0
"""Seconds between two polls of Flower's SuperNode; shorter sleeps are waits for a reply."""
FIRST_POLL = 0.1
"""Seconds after a message until the SuperNode polls for the next one."""
HELD_LONG = 5.0
"""Seconds after which an empty reply counts as held by the SuperLink."""
FIRST_LOOK = 0.03
LONGEST_LOOK = 0.5
"""Seconds between two checks for the reply to a message (Flower: .5)."""


class _NodePace:
    """Sleep times of the SuperNode: short after a message, longer while idle or waiting for a
    reply.

    A poll that took long was held by the SuperLink, so the next poll follows at once.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._message = Backoff(FIRST_POLL, FLOWER_POLL, growth=1.3)
        self._reply = Backoff(FIRST_LOOK, LONGEST_LOOK)
        self._clock = clock
        self._asked = clock()

    def __call__(self, seconds: float) -> float:
        """Seconds to sleep instead of Flower's."""
        if seconds < FLOWER_POLL:  # it waits for the reply to a message, so it is not idle
            self._message.restart()
            return min(seconds, self._reply.next())
        self._reply.restart()
        if self._clock() - self._asked > HELD_LONG:
            self._message.restart()
        pause = self._message.next()
        self._asked = self._clock() + pause
        return pause


HEARTBEAT = 15.0
"""Seconds between a node's heartbeats (Flower's default is 30, its minimum 10); a node is lost
after two. With shorter intervals a killed node is replaced earlier; with longer ones the SuperLink
may be offline for longer before it regards nodes as lost."""


# The pieces of a message, many in one call.
# Missing in Flower: calls for several pieces, and shorter waits for a missing one. It sends a
# message as a tree of pieces, each named by the SHA-256 of its content, and pushes and pulls each
# piece in a separate call. A training message of a small model has six pieces and passes four pairs
# of processes: most of a round with many nodes was spent on these calls. Here one call names
# several pieces, separated by commas, and its content is `packed`. A call for a single piece is as
# in Flower. Every piece passes the checks of Flower's own state.

FIRST_PULL_WAIT = 0.05
LONGEST_PULL_WAIT = 1.0
"""Seconds before missing pieces of an announced message are requested again (Flower: 1 and 10)."""
LONGEST_WAIT = 7200.0
"""Timeout for an announced piece in seconds (as in Flower)."""
MOST_PIECES = 256
MOST_BYTES = 8 * 2**20
"""Bytes of a call; the last piece may exceed them by at most 5 MiB, Flower's piece size."""
_BETWEEN = ","

Pull = Callable[[str], bytes]
Push = Callable[[str, bytes], None]


def _pull(
    object_ids: Iterable[str],
    pull_object_fn: Pull,
    *,
    max_time: float = LONGEST_WAIT,
    sleep: Callable[[float], None] = time.sleep,
    **_: Any,
) -> dict[str, bytes]:
    """Pull pieces; replaces Flower's `pull_objects`.

    Args:
        object_ids: names of the pieces.
        pull_object_fn: makes one call.
        max_time: timeout for announced pieces in seconds.
        sleep: waits for a number of seconds.

    Raises:
        ObjectPullError: a piece is unknown, unreadable, or did not arrive before the timeout.
    """
    missing = list(dict.fromkeys(object_ids))
    pieces: dict[str, bytes] = {}
    until = time.monotonic() + max_time
    pauses = Backoff(FIRST_PULL_WAIT, LONGEST_PULL_WAIT, growth=2.0)
    while missing:
        try:
            pieces |= _pulled(missing[:MOST_PIECES], pull_object_fn)
            pauses.restart()
        except ObjectUnavailableError:
            if time.monotonic() >= until:
                raise ObjectPullError(missing[0], "it did not arrive before the timeout") from None
            sleep(pauses.next())
        missing = [name for name in missing if name not in pieces]
    return pieces


def _pulled(names: list[str], pull_object_fn: Pull) -> dict[str, bytes]:
    """Make one call and return the available pieces that fit into a reply, at least one."""
    content = pull_object_fn(_BETWEEN.join(names))
    if len(names) == 1:
        return {names[0]: content}
    try:
        pieces = {part.name: part.data for part in opened(content)}
        if pieces.keys() - set(names):
            raise ValueError("it has other pieces")
        return pieces
    except Exception as error:  # untrusted input may be anything
        raise ObjectPullError(names[0], f"the reply is malformed: {error}") from error


def _push(object_contents: Iterable[tuple[str, bytes]], push_object_fn: Push, **_: Any) -> None:
    """Push pieces; replaces Flower's `push_object_contents_from_iterable`.

    Args:
        object_contents: names and contents of the pieces.
        push_object_fn: makes one call.
    """
    batch: dict[str, bytes] = {}
    for name, piece in object_contents:
        size = sum(map(len, batch.values())) + len(piece)
        if batch and (len(batch) == MOST_PIECES or size > MOST_BYTES):
            _push_batch(batch, push_object_fn)
            batch = {}
        batch[name] = piece
    if batch:
        _push_batch(batch, push_object_fn)


def _push_batch(pieces: dict[str, bytes], push_object_fn: Push) -> None:
    if len(pieces) == 1:
        push_object_fn(*next(iter(pieces.items())))
    else:
        push_object_fn(_BETWEEN.join(pieces), _packed(pieces))


def _packed(pieces: Mapping[str, bytes]) -> bytes:
    return packed(PackedArray(name, "", (), "", piece) for name, piece in pieces.items())


def _use_packed_pieces(*modules: Any, longest_wait: float = LONGEST_WAIT) -> None:
    """Replace `pull_objects` and its push counterpart in Flower's module and in modules that
    imported them.

    Args:
        modules: modules that imported them.
        longest_wait: timeout for an announced piece in seconds.
    """
    patched: tuple[Any, ...] = (inflatable_utils, *modules)
    for module in patched:
        module.pull_objects = partial(_pull, max_time=longest_wait)
        module.push_object_contents_from_iterable = _push


class PackedPieces:
    """State of a SuperLink or SuperNode whose calls may name several pieces."""

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """Get a piece as Flower does: None if unknown, empty if not yet available. For several
        pieces, return the available ones, at least one, up to the size of a call."""
        names = object_id.split(_BETWEEN)
        if len(names) == 1:
            return super().get_object(run_id, object_id)  # type: ignore[misc]
        pieces: dict[str, bytes] = {}
        with self._transaction():
            for name in names[:MOST_PIECES]:
                piece = super().get_object(run_id, name)  # type: ignore[misc]
                if piece is None:
                    return None
                if piece:
                    pieces[name] = piece
                if sum(map(len, pieces.values())) >= MOST_BYTES:
                    break
        return _packed(pieces) if pieces else b""

    def store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        """Store pieces; return True if all were stored."""
        names = object_id.split(_BETWEEN)
        store = super().store_object  # type: ignore[misc]
        if len(names) == 1:
            return store(run_id, session_id, object_id, object_content)
        try:
            parts = opened(object_content)
        except Exception:  # untrusted input may be anything
            return False
        if [part.name for part in parts] != names:
            return False
        with self._transaction():
            return all(store(run_id, session_id, part.name, part.data) for part in parts)

    def _transaction(self) -> AbstractContextManager[Any]:
        """Open one transaction for all pieces, if the state is in a database."""
        return self.session() if hasattr(self, "session") else nullcontext()  # type: ignore[attr-defined]


# A SuperNode that replies to every message exactly once, never with a late reply to another one.
#
# Missing in Flower: a reply for a process that was killed together with its executor. The SuperNode
# works on one message at a time, and waits for any reply without end: the node would stay online
# and never take a message again. If a run is stopped while a message arrives, Flower's loop forgets
# the message but its state does not: the late reply would be sent as the reply to the next message.

_FINISHED = "finished"
_COMPLETED = "completed"  # Flower's status and sub-status of a finished task
_CRASHED = Error(8, "ClientApp stopped responding.")  # as Flower's for a lost process


class _SuperNodeState(PackedPieces, nodestate_factory.InMemoryNodeState):  # type: ignore[misc]
    """State of a SuperNode that replies to every message exactly once.

    Args:
        object_store: Flower's object store.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: Any) -> None:
        super().__init__(object_store)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """Store a message as Flower does; a new message ends earlier ones."""
        if not message.metadata.reply_to_message_id:
            with self.lock_msg_store:
                stale = [
                    identifier
                    for identifier in self.msg_store
                    if identifier != message.metadata.message_id
                ]
                self._forgotten.extend(stale)
                self.delete_messages(message_ids=stale)
            for identifier in stale:
                self.object_store.delete(identifier)
        return super().store_message(message)

    def get_messages_legacy(self, **asked: Any) -> Sequence[Message]:
        """Get replies as Flower does, without those to ended messages."""
        return [
            message
            for message in super().get_messages_legacy(**asked)
            if message.metadata.reply_to_message_id not in self._forgotten
        ]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """Create a task as Flower does, and remove finished ones, as there is one message at a
        time."""
        with self.lock_task_store:
            for task in list(self.task_store.values()):
                if task.status.status == _FINISHED:
                    del self.task_store[task.task_id]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task as Flower does; a task that failed late does not reply to the next
        message."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != _COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, _CRASHED)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """Store error replies as Flower does, also to messages that were not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if (
                    entry.message.metadata.run_id in run_ids
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)


def _load() -> Any:
    """Import and patch all parts of Flower's SuperNode, once before forking, and return its main
    loop."""
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    importlib.import_module("flwr.supernode.main")  # otherwise imported by each SuperNode
    flower_commands.load("flower-supernode")
    _use_packed_pieces(loop)
    return loop


def supernode(arguments: list[str]) -> None:
    """Run `flower-supernode` with shorter waits, faster heartbeats, and a reply to every message.
    If the server does not accept the node's key, the process exits with the status `REFUSED`.

    Args:
        arguments: arguments of `flower-supernode`.
    """
    _load().time = _PacedTime(_NodePace())
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]
    nodestate_factory.InMemoryNodeState = _SuperNodeState  # type: ignore[misc]
    _ending_as_refused(partial(flower_commands.run, "flower-supernode", arguments))


def _ending_as_refused(connect: Callable[[], None]) -> None:
    """Run a SuperNode; exit with the status `REFUSED` if the server rejected it (401, 403 or
    similar), otherwise as Flower does."""
    try:
        connect()
    except BaseException as end:
        error: BaseException | None = end
        while error is not None and not isinstance(error, httpx.HTTPStatusError):
            error = error.__context__
        if error is not None and 400 <= error.response.status_code < 500:
            print(f"the server does not accept this node's key: {error}", file=sys.stderr)
            sys.exit(REFUSED)
        raise


# An executor that runs each task in a fork of its process, with all modules imported.
#
# Missing in Flower: an executor that does not start a new Python for a task, that reports a killed
# task at once, and that survives a failed call.

AGAIN = 1.0
"""Seconds until a call that failed on the server is repeated."""

# Imported by name, because their packages define functions of the same names.
run_superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")


class _ForkExecutor:
    """Runs each task in a fork of this process, which has imported all modules.

    Args:
        kind: kind of its tasks, by the name of Flower's command for them.
        become: runs a task in the fork.
        backoff: the sleeps between two polls for a task.
    """

    def __init__(self, kind: str, become: Callable[[Any], None], backoff: Backoff) -> None:
        self._kind = kind
        self._become = become
        self._backoff = backoff
        self._children: dict[Fork, Any] = {}

    def get_eligible_capacity(
        self, supported_task_types: set[str], **_: Any
    ) -> tuple[set[str], set[str]]:
        """Capacity for tasks of one kind."""
        return {kind for kind in supported_task_types if kind == self._kind}, set()

    def launch(self, spec: Any) -> Any:
        """Run one task in a child process."""
        self._backoff.restart()
        self._children[Fork(partial(self._run, spec))] = spec
        return run_superexec.LaunchResult.accepted()

    def _run(self, spec: Any) -> None:
        self._children = {}  # of the parent; its exit handler would end them
        try:
            self._become(spec)
        except Exception as error:  # before Flower's own error handling, which ends the process
            _report_failure(spec, f"{type(error).__name__}: {error}")
            raise

    def reconcile(self) -> None:
        """Collect finished children, and report killed ones to Flower immediately instead of after
        a minute."""
        for child, spec in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[child]
                if code < 0:
                    _report_failure(spec, f"ended by signal {-code}")

    def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)


def _report_failure(spec: Any, reason: str) -> None:
    """Report the failure of a task for its process; if the report is lost, Flower detects the
    failure later.

    Args:
        spec: Flower's description of the task.
        reason: why it failed.
    """
    certificate = spec.root_certificates_path
    client = run_clientapp.RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=None if certificate is None else Path(certificate).read_bytes(),
        interceptors=[
            run_clientapp.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            run_clientapp.RuntimeTokenHttpInterceptor(spec.token),
        ],
    )
    with client:
        run_clientapp.push_task_output(client, None, "failed", reason)  # logs what it cannot push


class _TolerantClient(run_superexec.RuntimeHttpClient):
    """An executor's client, which retries calls that fail on the server. Flower's executor exits
    instead, for example if the database is busy, and its ServerApp and the run end."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._owner = os.getpid()

    def AcquireTask(self, request: Any) -> Any:
        """Acquire a task, if there is one."""
        while True:
            try:
                return super().AcquireTask(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise
            time.sleep(AGAIN)

    def close(self) -> None:
        """Close the connection, except in a fork, which does not own it."""
        if os.getpid() == self._owner:
            super().close()


# Flower's executors of the server and of nodes, which run each task in a fork.

PIECES_WAIT = 60.0
"""Seconds that the ServerApp waits for the pieces of an announced reply; with Flower's two hours a
node could block a round by never sending them."""
LONGEST_POLL = 1.0
"""Longest time in seconds between two polls of an idle executor, as in Flower."""
SERVER_APP = "flwr-serverapp"
CLIENT_APP = "flwr-clientapp"
"""Kinds of tasks, named by Flower's commands that run them."""


def server_executor(arguments: list[str]) -> None:
    """Run `flower-superexec`, which forks ServerApps and retries failed calls."""
    _use_packed_pieces(longest_wait=PIECES_WAIT)
    _execute(SERVER_APP, arguments)


def client_executor(arguments: list[str], load_app: Callable[[str, str, str], ClientApp]) -> None:
    """Run `flower-superexec`, which forks ClientApps of this installation: Flower would install and
    run the code that the server sends.

    Args:
        arguments: arguments of `flower-superexec`.
        load_app: loads an app, given the name, version and hash of the server's app.
    """
    _use_packed_pieces()
    run_clientapp.get_load_client_app_fn = lambda **_: load_app
    run_clientapp.install_from_fab = lambda *_, **__: None
    _execute(CLIENT_APP, arguments)


def _execute(kind: str, arguments: list[str]) -> None:
    flower_commands.load(kind)  # once for all forks
    backoff = Backoff(FIRST_POLL, LONGEST_POLL)
    executor = _ForkExecutor(kind, partial(_work_on, kind), backoff)
    run_superexec.RuntimeHttpClient = _TolerantClient
    run_superexec.time = _PacedTime(lambda _: backoff.next())
    run_superexec.get_executor = lambda *_, **__: executor
    flower_commands.run("flower-superexec", arguments)


def _work_on(kind: str, task: Any) -> None:
    """Run Flower's command for one task."""
    arguments = ["--runtime-api-address", task.runtime_api_address, "--token", task.token]
    if task.root_certificates_path is not None:
        arguments += ["--root-certificates", task.root_certificates_path]
    flower_commands.run(kind, [*arguments, "--parent-pid", str(os.getppid())])


# Nodes as forks of one process that has imported everything.
#
# Importing Flower and torch takes seconds of a core and 250 MiB for each of a node's two processes.
# Forks share both (memory is copy-on-write), so a machine can run many more nodes. Nodes are as
# isolated from each other as two programs of one user.

_LATER = ("torch.optim", "fedrec.privacy.plan")
"""Modules imported before forking."""


def _own_app(_identifier: str, version: str, _digest: str) -> ClientApp:
    """Return this installation's ClientApp; a node never runs the server's code.

    Raises:
        ClientError: the server runs another version of fedrec.
    """
    from clients.app import app

    if __version__ not in (version, "0+unknown"):
        raise ClientError(
            "server and node run different versions of fedrec",
            expected=f"fedrec {__version__}, as on this node",
            got=f"fedrec {version}",
            fix="install the same version on both",
        )
    return app


def import_everything(*, trains: bool = True) -> None:
    """Import all modules and load the compiled code, once for all forks of this process; in a fork
    this would take a second of a core per message. It takes about 15 s if the code was never
    compiled on this machine.

    Args:
        trains: whether forks train; a SuperNode alone needs no compiled code.
    """
    import clients.app
    import clients.device.node  # noqa: F401
    from fedrec.components import registry
    from fedrec.training.kernel import compile_ahead

    for kind in (registry.STEP, registry.MODEL, registry.SPLIT, registry.STRATEGY):
        list(registry.available(kind))
    for name in _LATER:
        importlib.import_module(name)
    for name in ("flower-superexec", CLIENT_APP):
        flower_commands.load(name)
    _load()
    if trains:
        compile_ahead("train_clients")
    gc.collect()
    gc.freeze()  # otherwise garbage collection writes to all pages that forks share


def executor(arguments: list[str]) -> None:
    """Wait for messages and work on each in a fork, with the flags of `flower-superexec`."""
    _log_to_standard_error()
    _read_before()
    client_executor(arguments, _own_app)


def _log_to_standard_error() -> None:
    """Write fedrec's warnings and errors to standard error, which is the node's log: Flower writes
    only its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("fedrec")
    logger.handlers[:] = [handler]
    logger.disabled = logger.propagate = False


def _read_before() -> None:
    """Read the node's data once for all messages; data errors are raised by each message."""
    from clients.device.own_data import read_own
    from simulations.deployment.layout import CATALOGUE, DATA

    if DATA in os.environ:
        with suppress(FedrecError):
            read_own(Path(os.environ[DATA]), Path(os.environ[CATALOGUE]))
