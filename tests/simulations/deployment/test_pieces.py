# SPDX-License-Identifier: Apache-2.0
"""Several pieces of a message in one call, against Flower's functions and handlers for one."""

from __future__ import annotations

import inspect
from contextlib import suppress
from hashlib import sha256
from types import SimpleNamespace

import pytest
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
)
from flwr.superlink.routers.fleet import router
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as link_handlers
from flwr.supernode.servicer.runtime import runtime_handlers as node_handlers
from hypothesis import given
from hypothesis import strategies as st

from simulations.deployment.flower import executors, pieces, supernode


def named(*contents):
    return {sha256(content).hexdigest(): content for content in contents}


ALL = named(b"one", b"", b"three" * 50, b"four")
NODE = Node(node_id=1)


class Store:
    """A SuperLink's pieces, behind Flower's functions for one piece: `None` is an announced piece
    that is missing."""

    def __init__(self, held):
        self.held, self.calls, self.handled = dict(held), 0, 0
        self._pull = pieces.answering_pulls(self._pulled)
        self._push = pieces.answering_pushes(self._pushed)

    def _pulled(self, request, state):
        self.handled += 1
        content = self.held.get(request.object_id, b"unknown")
        return PullObjectResponse(
            object_found=content != b"unknown",
            object_available=content is not None,
            object_content=content or b"",
        )

    def _pushed(self, request, state):
        self.handled += 1
        genuine = sha256(request.object_content).hexdigest() == request.object_id
        if genuine:
            self.held[request.object_id] = request.object_content
        return PushObjectResponse(stored=genuine)

    def _called(self, handler, request):
        self.calls += 1
        return handler(request=request, state=SimpleNamespace())  # as Flower's routes call it

    def pulling(self):
        return make_pull_object_fn_protobuf(lambda asked: self._called(self._pull, asked), NODE, 5)

    def pushing(self):
        return make_push_object_fn_protobuf(
            lambda asked: self._called(self._push, asked), NODE, 5, "session"
        )


def test_all_pieces_take_one_call_and_each_passes_flowers_handler():
    store = Store(ALL)
    assert pieces.pull(ALL, store.pulling()) == ALL
    assert (store.calls, store.handled) == (1, 4)
    other = Store({})
    pieces.push(ALL.items(), other.pushing())
    assert other.held == ALL and (other.calls, other.handled) == (1, 4)


def test_one_piece_is_sent_as_flower_sends_it():
    one = named(b"one")
    store = Store(one)
    assert pieces.pull(one, store.pulling()) == inflatable_utils.pull_objects(
        list(one), store.pulling()
    )
    pieces.push(one.items(), store.pushing())
    assert store.held == one


def test_pieces_that_are_not_there_yet_are_asked_for_again_and_no_others():
    late = dict.fromkeys(ALL)
    store = Store({**ALL, next(iter(ALL)): None})
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            store.held.update(ALL)

    assert pieces.pull(late, store.pulling(), sleep=sleep) == ALL
    assert waits == [0.05, 0.1] and store.calls == 4
    assert store.handled == 4 + 3  # three calls for the missing one only


def test_a_piece_that_never_comes_is_given_up():
    def missing(object_id):
        raise ObjectUnavailableError(object_id)

    with pytest.raises(ObjectPullError, match="not there in time"):
        pieces.pull(["a", "b"], missing, max_time=0.1)


def test_an_unknown_piece_is_an_error_at_once():
    store = Store(ALL)
    with pytest.raises(ObjectPullError, match="could not be found"):
        pieces.pull([*ALL, "unknown"], store.pulling())


def test_a_forged_piece_is_an_error():
    store = Store({})
    with pytest.raises(ObjectPushError):
        pieces.push({**ALL, "0" * 64: b"forged"}.items(), store.pushing())
    assert "0" * 64 not in store.held


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, pieces.packed({0: b"a", 2: b"b"}), b"\xff" * 9]
)
def test_pushes_that_cannot_be_read_are_refused_before_any_piece(content):
    store = Store({})
    with pytest.raises(ObjectPushError):
        store.pushing()("a,b", content)
    assert store.handled == 0


@pytest.mark.parametrize("content", [b"\0" * 7, pieces.packed({9: b"a"}), b"\xff" * 9])
def test_answers_that_cannot_be_read_are_errors(content):
    with pytest.raises(ObjectPullError, match="cannot be read"):
        pieces.pull(["a", "b"], lambda _: content)


def test_a_call_has_bounds(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_BYTES", 300)
    monkeypatch.setattr(pieces, "MOST_PIECES", 3)
    many = named(*(bytes([number]) * 100 for number in range(10)))
    store = Store(many)
    assert pieces.pull(many, store.pulling()) == many and store.calls == 4
    other = Store({})
    pieces.push(many.items(), other.pushing())
    assert other.held == many and other.calls == 4


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=50)))
def test_packed_pieces_are_unpacked(found):
    assert pieces.unpacked(pieces.packed(found)) == found


@given(st.binary(max_size=60))
def test_unpacking_any_bytes_gives_pieces_or_a_value_error(content):
    with suppress(ValueError):
        assert isinstance(pieces.unpacked(content), dict)


def test_flower_calls_what_is_replaced_by_name():
    """Fails if a new version of Flower moves them."""
    for module in (supernode.start_client_internal, executors.http_grid):
        assert module.pull_objects is inflatable_utils.pull_objects
    source = inspect.getsource(supernode.start_client_internal)
    assert "push_object_contents_from_iterable(" in source
    for function in (
        inflatable_utils.pull_and_inflate_object_from_tree,
        executors.http_grid.HttpGrid.pull_messages,
        supernode.start_client_internal._pull_and_store_message,
    ):
        assert "pull_objects(" in inspect.getsource(function)
    assert "push_object_contents_from_iterable(" in inspect.getsource(inflatable_utils.push_objects)
    assert "except ObjectPullError" in inspect.getsource(executors.http_grid.HttpGrid.pull_messages)


def test_flowers_routes_find_their_handlers_by_name():
    for name in ("pull_object", "push_object"):
        assert f"fleet_handlers.{name}(" in inspect.getsource(router)
        for handlers in (fleet_handlers, link_handlers, node_handlers):
            assert list(inspect.signature(getattr(handlers, name)).parameters)[:2] == [
                "request",
                "state",
            ]
