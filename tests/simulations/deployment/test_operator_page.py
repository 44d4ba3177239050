# SPDX-License-Identifier: Apache-2.0
"""The operator's page: what it says, who sees it, and how a browser shows it."""

import asyncio
import base64
import ssl
import stat
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from simulations import runner
from simulations.deployment.flower import control
from simulations.deployment.initialise import initialise
from simulations.deployment.layout import DeploymentConfig
from simulations.deployment.page import content, served
from tests.fedrec.report.browser import CONTRAST, OUTSIDE
from tests.simulations.deployment.federation import free_ports

PRIVACY = "privacy={clip-norm=1.0, noise-multiplier=2.0, budget=50.0}"
STRANGE = "2026-01-01 00:00:00,000 WARNING node 7: <script>alert(1)</script> did not answer"


@pytest.fixture(scope="module")
def deployment(tiny_experiment, tmp_path_factory):
    """A deployment that does not run, with a finished run and a damaged one."""
    made = initialise(tmp_path_factory.mktemp("deployment") / "here", DeploymentConfig(nodes=2))
    runner.run(tiny_experiment(), [PRIVACY], output=made.path / "runs" / "first")
    with (made.path / "runs" / "first" / "log.txt").open("a") as log:
        log.write(f"{STRANGE}\n")
    damaged = made.path / "runs" / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{}")
    return made


@pytest.fixture
def two_nodes(monkeypatch):
    """A SuperLink that knows two nodes."""
    now = time.time()
    nodes = [
        control.NodeState(2**63, "online", b"", "node-1", 15.0, now + 26),
        control.NodeState(2**62, "online", b"", "node-2", 15.0, now + 8),
    ]
    superlink = SimpleNamespace(nodes=lambda: nodes, close=lambda: None)
    monkeypatch.setattr(control, "Control", lambda *_: superlink)


def test_it_says_how_nodes_and_runs_are(deployment, two_nodes):
    text = content.page(deployment)
    assert "Nodes: 1 of 2 registered ones heard of in time" in text
    assert "node-2" in text and "4 s ago" in text and "22 s; heartbeats come every 15 s" in text
    assert "9223372036854775808" not in text
    run = content.run_part(deployment.path / "runs" / "first")
    facts = dict(run.facts)
    assert facts["state"] == "finished" and facts["rounds"] == "2 of 2"
    assert float(facts["epsilon spent"]) > 0 and facts["budget"] == "epsilon 50"
    assert [row.name for row in run.rounds.rows] == ["2", "1"] and "hits@5" in run.rounds.heads
    assert run.faults[0] == STRANGE
    assert "<script>" not in text and "&lt;script&gt;alert(1)" in text
    damaged = content.run_part(deployment.path / "runs" / "damaged")
    assert "is not a run folder" in dict(damaged.facts)["state"]


def test_without_a_superlink_it_says_so(deployment):
    text = content.page(deployment)
    assert "The SuperLink does not answer" in text and "0 of 0 registered" in text
    assert text.count("not running") >= 3


def test_only_who_has_the_key_sees_it_and_nothing_can_be_sent(deployment, two_nodes):
    file = served.key_file(deployment)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and served.key_file(deployment) == file
    key = file.read_text().strip()
    app = served.create_app(deployment)
    for auth in (None, ("operator", ""), ("operator", key + "x"), ("root", key)):
        found = asked(app, auth=auth)
        assert found.status_code == 401 and "node" not in found.text
    for header in ("Basic", "Basic \u00e9", "Basic ====", f"Bearer {key}"):
        assert asked(app, headers={"authorization": header.encode()}).status_code == 401
    right = ("operator", key)
    assert "1 of 2 registered" in asked(app, auth=right).text
    assert asked(app, "POST", auth=right).status_code == 405
    assert asked(app, "GET", "/runs/first/log.txt", auth=right).status_code == 404
    policy = asked(app, auth=right).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")


def asked(app, method="GET", path="/", **given):
    """The answer of the page to a request."""

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://page") as client:
            return await client.request(method, path, **given)

    return asyncio.run(ask())


@pytest.fixture
def address(deployment, two_nodes, monkeypatch):
    """Address of the page, served with the deployment's certificate."""
    (port,) = free_ports(1)
    servers = []
    made = uvicorn.Server.__init__

    def noted(self, config):
        made(self, config)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", noted)
    thread = threading.Thread(target=served.serve, args=(deployment, "127.0.0.1", port))
    thread.start()
    deadline = time.monotonic() + 60
    while not (servers and servers[0].started) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"https://127.0.0.1:{port}/"
    servers[0].should_exit = True
    thread.join(30)


def test_it_is_served_with_the_deployments_certificate(deployment, address):
    trusted = ssl.create_default_context(cafile=str(deployment.authority))
    key = served.key_file(deployment).read_text().strip()
    found = httpx.get(address, auth=("operator", key), verify=trusted)
    assert found.status_code == 200 and "1 of 2 registered" in found.text
    with pytest.raises(httpx.ConnectError):  # an authority of others
        httpx.get(address, auth=("operator", key))


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it_and_asks_for_nothing_else(chromium, deployment, address, width):
    key = served.key_file(deployment).read_text().strip()
    chromium.send("Security.setIgnoreCertificateErrors", ignore=True)
    chromium.send("Network.setExtraHTTPHeaders", headers={"Authorization": basic(key)})
    chromium.show(width=width, height=740)
    chromium.visit(address)
    assert chromium.requests() == [address] and chromium.complaints() == []
    assert "Newest rounds" in chromium.evaluate("document.body.innerText")
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(OUTSIDE) == []
    assert [(ratio, text) for ratio, text in chromium.evaluate(CONTRAST) if ratio < 4.5] == []
    chromium.send("Network.setExtraHTTPHeaders", headers={})


def basic(key):
    return f"Basic {base64.b64encode(f'operator:{key}'.encode()).decode()}"
