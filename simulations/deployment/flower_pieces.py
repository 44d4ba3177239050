# SPDX-License-Identifier: Apache-2.0
"""The pieces of a message, many in one call.

Missing in Flower: calls for more than one piece, and shorter waits for a missing one. It sends a
message as a tree of pieces, each named by the SHA-256 of its content, and pushes and pulls each in
a call of its own. A training message of a small model has six, and passes four pairs of processes:
most of a round with many nodes was spent on calls for pieces. Here one call names several pieces,
separated by commas, and its content is `packed`. A call for a single piece is as in
Flower. Every piece passes the checks of Flower's own state.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

from fedrec.runtime.process import Backoff

FIRST_PULL_WAIT = 0.05
LONGEST_PULL_WAIT = 1.0
"""Seconds before missing pieces of an announced message are requested again (Flower: 1 and 10)."""
LONGEST_WAIT = 7200.0
"""Seconds until an announced piece is given up (as in Flower)."""
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
    max_time: float = LONGEST_WAIT,
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


def use(*modules: Any, longest_wait: float = LONGEST_WAIT) -> None:
    """Replace these functions in this process, in Flower's module and in those that have imported
    them.

    Args:
        modules: that have imported them.
        longest_wait: seconds until an announced piece is given up.
    """
    ours = {
        "pull_objects": partial(pull, max_time=longest_wait),
        "push_object_contents_from_iterable": push,
    }
    for module in (inflatable_utils, *modules):
        for name, function in ours.items():
            setattr(module, name, function)


class PackedPieces:
    """The state of a SuperLink or SuperNode, whose calls may name several pieces."""

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """As Flower's: None for an unknown piece, empty if it is not there yet. Of several pieces,
        those that are there, at least one, up to the size of a call."""
        names = object_id.split(_BETWEEN)
        if len(names) == 1:
            return super().get_object(run_id, object_id)  # type: ignore[misc]
        found: dict[int, bytes] = {}
        size = 0
        with self._transaction():
            for place, name in enumerate(names[:MOST_PIECES]):
                piece = super().get_object(run_id, name)  # type: ignore[misc]
                if piece is None:
                    return None
                if piece:
                    found[place] = piece
                    size += len(piece)
                if size >= MOST_BYTES:
                    break
        return packed(found)

    def store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        """As Flower's; whether all pieces were stored."""
        names = object_id.split(_BETWEEN)
        store = super().store_object  # type: ignore[misc]
        if len(names) == 1:
            return store(run_id, session_id, object_id, object_content)
        try:
            pieces = unpacked(object_content)
        except ValueError:
            return False
        if list(pieces) != list(range(len(names))):
            return False
        with self._transaction():
            return all(
                store(run_id, session_id, name, piece)
                for name, piece in zip(names, pieces.values(), strict=True)
            )

    def _transaction(self) -> AbstractContextManager[Any]:
        """One for all pieces, where the state is in a database."""
        return self.session() if hasattr(self, "session") else nullcontext()  # type: ignore[attr-defined]
