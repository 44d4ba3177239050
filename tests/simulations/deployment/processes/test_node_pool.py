# SPDX-License-Identifier: Apache-2.0
"""Nodes as forks: what their owner is told about a key that the server does not accept."""

import os
import sys
from functools import partial

import httpx
import pytest

from fedrec.runtime.forks import Fork
from simulations.deployment.flower import supernode
from simulations.deployment.processes.commands import Process
from simulations.deployment.processes.node_pool import NodePool
from tests.simulations.deployment.federation import until


def ended(pool, count):
    """Whether the process has ended so many times; it is started again at once."""
    pool._due["supernode"] = 0.0
    pool._step()
    return pool._restarts["supernode"] >= count


@pytest.mark.parametrize(("status", "lines"), [(supernode.REFUSED, 1), (1, 0)])
def test_a_refused_key_is_reported_once_on_the_terminal(tmp_path, capsys, status, lines):
    process = Process("supernode", ("refused",))
    pool = NodePool([process], tmp_path, {"refused": lambda _: sys.exit(status)})
    for count in (1, 2):
        until(lambda count=count: ended(pool, count), what="an end")
    shown = capsys.readouterr().err
    assert shown.count("supernode: the server does not accept this node's key") == lines
    assert shown.count("fedrec deploy register DEPLOYMENT") == lines


@pytest.mark.parametrize("status", [401, 403, 412, 503])
def test_a_supernode_whose_key_is_refused_ends_with_its_own_status(monkeypatch, capfd, status):
    """In a fork, because Flower ends the process."""
    loop = supernode.load()
    server = httpx.MockTransport(lambda asked: httpx.Response(status, request=asked))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=server))

    def connect():
        loop.register_signal_handlers(loop.EventType.RUN_SUPERNODE_LEAVE)
        with loop._init_connection("gateway:1", True, max_retries=0):
            raise AssertionError("there is no connection")

    child = Fork(lambda: supernode.ending_as_refused(connect)).pid
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    refused = "the server does not accept this node's key" in capfd.readouterr().err
    assert (ended, refused) == ((1, False) if status == 503 else (supernode.REFUSED, True))
