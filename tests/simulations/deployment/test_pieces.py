# SPDX-License-Identifier: Apache-2.0
"""Several pieces of a message in one call, against Flower's functions and handlers for one."""

import inspect
import runpy
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256

import pytest
from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
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
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as link_handlers
from flwr.supernode.servicer.runtime import runtime_handlers as node_handlers
from hypothesis import given
from hypothesis import strategies as st

from simulations.deployment.flower import supernode
from simulations.deployment.flower.patches import pieces


def named(*contents):
    return {sha256(content).hexdigest(): content for content in contents}


ALL = named(b"one", b"2", b"three" * 50, b"four")
NODE = Node(node_id=1)


class Single:
    """A state as Flower's, for one piece: `None` is an announced piece that is missing."""

    def __init__(self, held):
        self.held = dict(held)
        self.calls = self.handled = 0

    def get_object(self, run_id, object_id):
        self.handled += 1
        content = self.held.get(object_id, b"unknown")
        return None if content == b"unknown" else content or b""

    def store_object(self, run_id, session_id, object_id, object_content):
        self.handled += 1
        genuine = sha256(object_content).hexdigest() == object_id
        if genuine:
            self.held[object_id] = object_content
        return genuine


class Store(pieces.PackedPieces, Single):
    """The same for several pieces, behind Flower's functions that make and read calls."""

    def _pull(self, request: PullObjectRequest):
        self.calls += 1
        content = self.get_object(5, request.object_id)  # as Flower's handlers
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content
        )

    def _push(self, request: PushObjectRequest):
        self.calls += 1
        stored = self.store_object(5, "session", request.object_id, request.object_content)
        return PushObjectResponse(stored=stored)

    def pulling(self):
        return make_pull_object_fn_protobuf(self._pull, NODE, 5)

    def pushing(self):
        return make_push_object_fn_protobuf(self._push, NODE, 5, "session")


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


def test_flower_sends_and_fetches_each_piece_in_a_call_of_its_own():
    """If this fails, a new version of Flower may no longer need `patches/pieces.py`."""
    store = Store({})
    usual = runpy.run_path(inflatable_utils.__file__, run_name=inflatable_utils.__name__)
    usual["push_object_contents_from_iterable"](ALL.items(), store.pushing())
    assert store.calls == len(ALL) and store.held == ALL
    assert usual["pull_objects"](list(ALL), store.pulling()) == ALL
    assert store.calls == 2 * len(ALL)


def test_flower_calls_what_is_replaced_by_name():
    """Fails if a new version of Flower moves them."""
    source = inspect.getsource(supernode.load())
    assert "push_object_contents_from_iterable(" in source and " pull_objects(" in source
    for name in ("pull_and_inflate_object_from_tree", "push_objects"):
        called = getattr(inflatable_utils, name).__code__.co_names
        assert {"pull_objects", "push_object_contents_from_iterable"} & set(called)


@pytest.mark.parametrize("handlers", [fleet_handlers, link_handlers, node_handlers])
def test_flowers_handlers_ask_the_state_for_a_piece_by_its_name(handlers):
    assert ".get_object(" in inspect.getsource(handlers.pull_object)
    assert "state.store_object(" in inspect.getsource(handlers.push_object)


@pytest.mark.slow
def test_a_serverapp_waits_for_pieces_as_long_as_it_is_told():
    """The patch comes before the first import of the module that fetches replies."""
    code = (
        "from simulations import flower_commands\n"
        "from simulations.deployment.flower import executors\n"
        "flower_commands.run = lambda *_: None\n"
        "executors.server_executor([])\n"
        "from flwr.superlink.grid import http_grid\n"
        "print(http_grid.pull_objects.keywords['max_time'], http_grid.push_objects.__globals__"
        "['push_object_contents_from_iterable'].__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["60.0", pieces.__name__], done.stderr
