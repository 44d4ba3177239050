# SPDX-License-Identifier: Apache-2.0
"""Nodes as forks: what their owner is told about a key that the server does not accept."""

from __future__ import annotations

import sys

import httpx
import pytest

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


@pytest.mark.parametrize("status", [401, 403, 412])
def test_a_supernode_whose_key_is_refused_ends_with_its_own_status(monkeypatch, status, capsys):
    def refuse(self, request):
        asked = httpx.Request("POST", "https://gateway/v1/fleet/activate-node")
        httpx.Response(status, request=asked).raise_for_status()

    monkeypatch.setattr(supernode.FleetHttpClient, "ActivateNode", refuse)
    with pytest.raises(SystemExit) as end:
        object.__new__(supernode.KeptConnections).ActivateNode(None)
    assert end.value.code == supernode.REFUSED and str(status) in capsys.readouterr().err


def test_a_server_that_is_away_is_not_a_refusal(monkeypatch):
    def away(self, request):
        asked = httpx.Request("POST", "https://gateway/v1/fleet/activate-node")
        httpx.Response(503, request=asked).raise_for_status()

    monkeypatch.setattr(supernode.FleetHttpClient, "ActivateNode", away)
    with pytest.raises(httpx.HTTPStatusError):
        object.__new__(supernode.KeptConnections).ActivateNode(None)
