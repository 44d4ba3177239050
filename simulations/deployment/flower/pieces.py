# SPDX-License-Identifier: Apache-2.0
"""The pieces of a message, many in one call.

Flower sends a message as a tree of pieces, each named by the SHA-256 of its content, and pushes and
pulls each in a call of its own. A training message of a small model has six, and passes four pairs
of processes: most of a round with many nodes was spent on calls for pieces. Here one call names
several pieces, separated by commas, and its content is `packed`. A call for a single piece is as in
Flower. Every piece passes Flower's own handler, with its checks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.supercore.constant import PULL_MAX_TIME
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from fedrec.runtime.backoff import Backoff

FIRST_PULL_WAIT = 0.05
LONGEST_PULL_WAIT = 1.0
"""Seconds before missing pieces of an announced message are requested again (Flower: 1 and 10)."""
MOST_PIECES = 256
MOST_BYTES = 8 * 2**20
"""Bytes of a call; the last piece may exceed them, by at most 5 MiB, the size at which Flower
cuts."""
_BETWEEN = ","
_HEAD = struct.Struct(">II")  # place among the pieces that were asked for, bytes

Pull = Callable[[str], bytes]
Push = Callable[[str, bytes], None]


def packed(pieces: Mapping[int, bytes]) -> bytes:
    """Contents of pieces by their places, as one."""
    return b"".join(
        part for place, piece in pieces.items() for part in (_HEAD.pack(place, len(piece)), piece)
    )


def unpacked(content: bytes) -> dict[int, bytes]:
    """The inverse of `packed`.

    Raises:
        ValueError: these are not packed pieces.
    """
    found: dict[int, bytes] = {}
    start = 0
    while start < len(content):
        try:
            place, size = _HEAD.unpack_from(content, start)
        except struct.error as error:
            raise ValueError("cut within the head of a piece") from error
        start += _HEAD.size
        piece = content[start : start + size]
        if len(piece) != size:
            raise ValueError("cut within a piece")
        found[place] = piece
        start += size
    return found


def pull(
    object_ids: Iterable[str],
    pull_object_fn: Pull,
    *,
    max_time: float = PULL_MAX_TIME,
    sleep: Callable[[float], None] = time.sleep,
    **_: Any,
) -> dict[str, bytes]:
    """Replaces Flower's `pull_objects`.

    Args:
        object_ids: names of the pieces.
        pull_object_fn: a call.
        max_time: seconds until pieces that were announced are given up.
        sleep: waits.

    Raises:
        ObjectPullError: a piece is unknown, was not there in time, or cannot be read.
    """
    missing = list(dict.fromkeys(object_ids))
    found = {}
    until = time.monotonic() + max_time
    pauses = Backoff(FIRST_PULL_WAIT, LONGEST_PULL_WAIT, growth=2.0)
    while missing:
        try:
            found |= _asked(missing[:MOST_PIECES], pull_object_fn)
            pauses.restart()
        except ObjectUnavailableError:
            if time.monotonic() >= until:
                raise ObjectPullError(missing[0], "it was not there in time") from None
            sleep(pauses.next())
        missing = [name for name in missing if name not in found]
    return found


def _asked(names: list[str], pull_object_fn: Pull) -> dict[str, bytes]:
    """One call: the available pieces that fit into a reply, at least one."""
    content = pull_object_fn(_BETWEEN.join(names))
    if len(names) == 1:
        return {names[0]: content}
    try:
        return {names[place]: piece for place, piece in unpacked(content).items()}
    except (ValueError, IndexError) as error:
        raise ObjectPullError(names[0], f"the answer cannot be read: {error}") from error


def push(object_contents: Iterable[tuple[str, bytes]], push_object_fn: Push, **_: Any) -> None:
    """Replaces Flower's `push_object_contents_from_iterable`.

    Args:
        object_contents: names and contents of the pieces.
        push_object_fn: a call.
    """
    held: dict[str, bytes] = {}
    size = 0
    for name, piece in object_contents:
        if held and (len(held) == MOST_PIECES or size + len(piece) > MOST_BYTES):
            _sent(held, push_object_fn)
            held = {}
            size = 0
        held[name] = piece
        size += len(piece)
    if held:
        _sent(held, push_object_fn)


def _sent(pieces: dict[str, bytes], push_object_fn: Push) -> None:
    if len(pieces) == 1:
        push_object_fn(*next(iter(pieces.items())))
    else:
        push_object_fn(_BETWEEN.join(pieces), packed(dict(enumerate(pieces.values()))))


def use(*modules: Any) -> None:
    """Replace these functions in the modules of Flower that call them, in this process."""
    for module in (inflatable_utils, *modules):
        for name, ours in (("pull_objects", pull), ("push_object_contents_from_iterable", push)):
            if hasattr(module, name):
                setattr(module, name, ours)


def answer(handlers: Any) -> None:
    """Let the handlers of a SuperLink or a SuperNode answer calls for several pieces.

    Args:
        handlers: Flower's module, with `pull_object` and `push_object`.
    """
    handlers.pull_object = answering_pulls(handlers.pull_object)
    handlers.push_object = answering_pushes(handlers.push_object)


def answering_pulls(handler: Callable[..., PullObjectResponse]) -> Callable[..., Any]:
    """Flower's handler, for calls that name several pieces too."""

    def pull_object(request: PullObjectRequest, state: Any, *task: Any) -> PullObjectResponse:
        names = request.object_id.split(_BETWEEN)
        if len(names) == 1:
            return handler(request, state, *task)
        found: dict[int, bytes] = {}
        size = 0
        with _transaction(state):
            for place, name in enumerate(names[:MOST_PIECES]):
                one = PullObjectRequest(node=request.node, run_id=request.run_id, object_id=name)
                answer = handler(one, state, *task)
                if not answer.object_found:
                    return answer
                if answer.object_available:
                    found[place] = answer.object_content
                    size += len(answer.object_content)
                if size >= MOST_BYTES:
                    break
        return PullObjectResponse(
            object_found=True, object_available=bool(found), object_content=packed(found)
        )

    return pull_object


def answering_pushes(handler: Callable[..., PushObjectResponse]) -> Callable[..., Any]:
    """Flower's handler, for calls with several pieces too; if one is not stored, the answer says
    so."""

    def push_object(request: PushObjectRequest, state: Any, *task: Any) -> PushObjectResponse:
        names = request.object_id.split(_BETWEEN)
        if len(names) == 1:
            return handler(request, state, *task)
        try:
            pieces = unpacked(request.object_content)
        except ValueError:
            return PushObjectResponse(stored=False)
        if list(pieces) != list(range(len(names))):
            return PushObjectResponse(stored=False)
        with _transaction(state):
            for name, piece in zip(names, pieces.values(), strict=True):
                one = PushObjectRequest(
                    node=request.node,
                    run_id=request.run_id,
                    session_id=request.session_id,
                    object_id=name,
                    object_content=piece,
                )
                if not handler(one, state, *task).stored:
                    return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=True)

    return push_object


def _transaction(state: Any) -> AbstractContextManager[Any]:
    """One for all pieces, where the state is in a database."""
    return state.session() if hasattr(state, "session") else nullcontext()
