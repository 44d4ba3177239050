# SPDX-License-Identifier: Apache-2.0
"""The operator's view of a deployment, pieces of messages, and private parts of Flower."""

import ast
import asyncio
import base64
import logging
import re
import runpy
import ssl
import stat
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from hashlib import sha256
from importlib.util import find_spec
from types import SimpleNamespace

import flwr.app
import flwr.clientapp
import flwr.serverapp
import httpx
import pytest
import uvicorn
from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node, NodeInfo
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

from fedrec.errors import EngineError
from fedrec.runs.folder import RunFolder
from server import run
from server.callbacks import Callback
from server.nodes import DroppedReplies
from simulations import runner
from simulations.deployment import operator, page, supernode
from simulations.deployment import superlink as links
from simulations.deployment.layout import DeploymentConfig, initialise
from simulations.engines.flower import RunWatch
from simulations.flower_commands import are_alive
from tests.fedrec.report.browser import OUTSIDE
from tests.simulations.deployment.federation import free_ports
from tests.test_layers import PACKAGES, ROOT

# The operator's waiting; whole deployments are in `test_loopback.py`.


@pytest.fixture
def superlink(monkeypatch):
    """A SuperLink that returns prepared answers in turn, and the last one forever."""
    answers = []

    def nodes():
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return [SimpleNamespace(status=status) for status in found]

    monkeypatch.setattr(links, "Control", lambda _: nullcontext(SimpleNamespace(nodes=nodes)))
    monkeypatch.setattr(operator.time, "sleep", lambda _: None)
    return answers


def deployment(folder):
    return SimpleNamespace(superlink="127.0.0.1:1", authority=folder / "ca.crt", logs=folder)


def test_nodes_are_waited_for_while_a_busy_superlink_does_not_answer(superlink, tmp_path):
    superlink += [
        httpx.ReadTimeout("busy"),
        ["online", "created"],
        httpx.ReadTimeout("busy"),
        ["online"] * 2,
    ]
    operator._wait_for_nodes(deployment(tmp_path), 2, time.monotonic() + 60)
    assert len(superlink) == 1


def test_nodes_that_do_not_come_online_are_reported(superlink, tmp_path):
    superlink += [["online", "created"], httpx.ReadTimeout("busy")]
    with pytest.raises(EngineError, match="not all nodes came online") as caught:
        operator._wait_for_nodes(deployment(tmp_path), 2, time.monotonic() - 1)
    assert "1" in str(caught.value)


def test_without_a_list_of_processes_none_runs(tmp_path):
    assert operator.supervisor_of(deployment(tmp_path)) is None and not are_alive(tmp_path)


@pytest.mark.parametrize(
    ("status", "until", "words"),
    [
        ("online", 130.0, "0 s ago"),
        ("online", 115.5, "14 s ago"),
        ("offline", 92.0, "not after 19"),
        ("registered", 0.0, "never"),
    ],
)
def test_it_is_said_when_a_node_was_last_heard_of(status, until, words):
    """Flower keeps the moment until which a node counts as online: two intervals after its last
    heartbeat."""
    node = NodeInfo(status=status, heartbeat_interval=15.0, online_until=until)
    assert words in links.heard(node, 100.0)


def test_rounds_are_told_while_a_run_is_waited_for(load_tiny, tmp_path):
    folder = RunFolder.create(load_tiny("rounds=3"), tmp_path / "run")
    told = []

    class Told(Callback):
        def on_start(self, run, first_round, rounds):
            told.append((first_round, rounds))

        def after_round(self, row, seconds):
            told.append(row["round"])
            return False

        def on_event(self, event):
            told.append(event.text)

    watch = RunWatch(folder, [Told()])
    watch.look()
    assert told == []
    rows = [{"round": number, "loss": 0.5} for number in (1, 2, 3)]
    times = [{"round": number, "seconds": 1.0} for number in (1, 2, 3)]
    folder.set_status("running", 0)
    watch.look()
    folder.write_rounds(rows[:2], times[:2])
    watch.look()
    watch.look()
    folder.write_rounds(rows, times)
    watch.look()
    assert told == [(1, 3), 1, 2, 3, "evaluating on the nodes"]


def test_people_read_names_of_nodes(load_tiny, tmp_path):
    """In the log, in rounds.csv and in the sentence at the end."""
    names = {"8545123412341234898": "node-2"}
    folder = RunFolder.create(load_tiny(), tmp_path / "run")
    with run._log_to(folder, names):
        logging.getLogger("fedrec").warning("node %d failed: %s", 8545123412341234898, "lost")
        logging.getLogger("fedrec").info("node %d joined; 123456789 rows", 7)
    log = folder.log_file.read_text()
    assert "WARNING node-2 failed: lost" in log and "node 7 joined; 123456789 rows" in log
    dropped = DroppedReplies(called=names)
    dropped.dropped(8545123412341234898, "failed: no answer")
    assert dropped.after_round(1, None)["dropped-or-bounded"] == "node-2: failed: no answer"
    assert "(node-2 1)" in dropped.report(1)["in words"][0]


# The operator's page: what it says, who sees it, and how a browser shows it.

PRIVACY = "privacy={clip-norm=1.0, epsilon=50.0}"
STRANGE = "2026-01-01 00:00:00,000 WARNING node 7: <script>alert(1)</script> did not answer"


@pytest.fixture(scope="module")
def deployment_of_operator_page(tiny_experiment, tmp_path_factory):
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
        NodeInfo(
            node_id=node, status="online", name=name, heartbeat_interval=15.0, online_until=until
        )
        for node, name, until in ((2**63, "node-1", now + 26), (2**62, "node-2", now + 8))
    ]
    monkeypatch.setattr(
        links, "Control", lambda _: nullcontext(SimpleNamespace(nodes=lambda: nodes))
    )


def test_it_says_how_nodes_and_runs_are(deployment_of_operator_page, two_nodes):
    text = page.page(deployment_of_operator_page)
    assert "nodes: 2 of 2 registered nodes online" in text
    assert "node-2" in text and "4 s ago" in text and "22 s ago" in text
    assert "9223372036854775808" not in text
    run = page._run_part(deployment_of_operator_page.path / "runs" / "first")
    facts = dict(run.facts)
    assert facts["state"] == "finished" and facts["rounds"] == "2 of 2"
    assert float(facts["epsilon spent"]) > 0 and facts["budget"] == "epsilon 50"
    assert [row.name for row in run.rounds.rows] == ["2", "1"] and "hits@5" in run.rounds.heads
    assert run.faults[0] == STRANGE
    assert "<script>" not in text and "&lt;script&gt;alert(1)" in text
    damaged = page._run_part(deployment_of_operator_page.path / "runs" / "damaged")
    assert "is not a run folder" in dict(damaged.facts)["state"]


def test_without_a_superlink_it_says_so(deployment_of_operator_page):
    text = page.page(deployment_of_operator_page)
    assert "The SuperLink does not answer" in text and "0 of 0 registered" in text
    assert text.count("not running") >= 3


def test_only_who_has_the_key_sees_it_and_nothing_can_be_sent(
    deployment_of_operator_page, two_nodes
):
    file = page.key_file(deployment_of_operator_page)
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and page.key_file(deployment_of_operator_page) == file
    )
    key = file.read_text().strip()
    app = page.create_app(deployment_of_operator_page)
    for auth in (None, ("operator", ""), ("operator", key + "x"), ("root", key)):
        found = asked(app, auth=auth)
        assert found.status_code == 401 and "node" not in found.text
    for header in ("Basic", "Basic \u00e9", "Basic ====", f"Bearer {key}"):
        assert asked(app, headers={"authorization": header.encode()}).status_code == 401
    right = ("operator", key)
    assert "2 of 2 registered" in asked(app, auth=right).text
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
def address(deployment_of_operator_page, two_nodes, monkeypatch):
    """Address of the page, served with the deployment's certificate."""
    (port,) = free_ports(1)
    servers = []
    made = uvicorn.Server.__init__

    def noted(self, config):
        made(self, config)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", noted)
    thread = threading.Thread(
        target=page.serve, args=(deployment_of_operator_page, "127.0.0.1", port)
    )
    thread.start()
    deadline = time.monotonic() + 60
    while not (servers and servers[0].started) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"https://127.0.0.1:{port}/"
    servers[0].should_exit = True
    thread.join(30)


def test_it_is_served_with_the_deployments_certificate(deployment_of_operator_page, address):
    trusted = ssl.create_default_context(cafile=str(deployment_of_operator_page.authority))
    key = page.key_file(deployment_of_operator_page).read_text().strip()
    found = httpx.get(address, auth=("operator", key), verify=trusted)
    assert found.status_code == 200 and "2 of 2 registered" in found.text
    with pytest.raises(httpx.ConnectError):  # an authority of others
        httpx.get(address, auth=("operator", key))


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it_and_asks_for_nothing_else(
    chromium, deployment_of_operator_page, address, width
):
    key = page.key_file(deployment_of_operator_page).read_text().strip()
    chromium.send("Security.setIgnoreCertificateErrors", ignore=True)
    chromium.send("Network.setExtraHTTPHeaders", headers={"Authorization": basic(key)})
    chromium.show(width=width, height=740)
    chromium.visit(address)
    assert chromium.requests() == [address] and chromium.complaints() == []
    assert "Newest rounds" in chromium.evaluate("document.body.innerText")
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(OUTSIDE) == []
    chromium.send("Network.setExtraHTTPHeaders", headers={})


def basic(key):
    return f"Basic {base64.b64encode(f'operator:{key}'.encode()).decode()}"


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


class Store(supernode.PackedPieces, Single):
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
    assert supernode._pull(ALL, store.pulling()) == ALL
    assert (store.calls, store.handled) == (1, 4)
    other = Store({})
    supernode._push(ALL.items(), other.pushing())
    assert other.held == ALL and (other.calls, other.handled) == (1, 4)


def test_pieces_that_are_not_there_yet_are_asked_for_again_and_no_others():
    late = dict.fromkeys(ALL)
    store = Store({**ALL, next(iter(ALL)): None})
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            store.held.update(ALL)

    assert supernode._pull(late, store.pulling(), sleep=sleep) == ALL
    assert waits == [0.05, 0.1] and store.calls == 4
    assert store.handled == 4 + 3  # three calls for the missing one only


def test_a_piece_that_never_comes_is_given_up():
    def missing(object_id):
        raise ObjectUnavailableError(object_id)

    with pytest.raises(ObjectPullError, match="not arrive before the timeout"):
        supernode._pull(["a", "b"], missing, max_time=0.1)


def test_a_forged_piece_is_an_error():
    store = Store({})
    with pytest.raises(ObjectPushError):
        supernode._push({**ALL, "0" * 64: b"forged"}.items(), store.pushing())
    assert "0" * 64 not in store.held


OTHERS = supernode._packed({"a": b"a", "c": b"c"})


@pytest.mark.parametrize("content", [b"", b"\0" * 7, OTHERS, b"\xff" * 9])
def test_pushes_that_cannot_be_read_are_refused_before_any_piece(content):
    store = Store({})
    with pytest.raises(ObjectPushError):
        store.pushing()("a,b", content)
    assert store.handled == 0


@pytest.mark.parametrize("content", [b"\0" * 7, OTHERS, b"\xff" * 9])
def test_answers_that_cannot_be_read_are_errors(content):
    with pytest.raises(ObjectPullError, match="reply is malformed"):
        supernode._pull(["a", "b"], lambda _: content)


def test_a_call_has_bounds(monkeypatch):
    monkeypatch.setattr(supernode, "MOST_BYTES", 300)
    monkeypatch.setattr(supernode, "MOST_PIECES", 3)
    many = named(*(bytes([number]) * 100 for number in range(10)))
    store = Store(many)
    assert supernode._pull(many, store.pulling()) == many and store.calls == 4
    other = Store({})
    supernode._push(many.items(), other.pushing())
    assert other.held == many and other.calls == 4


def test_flower_sends_and_fetches_each_piece_in_a_call_of_its_own():
    """If this fails, a new version of Flower may no longer need `PackedPieces`."""
    store = Store({})
    usual = runpy.run_path(inflatable_utils.__file__, run_name=inflatable_utils.__name__)
    usual["push_object_contents_from_iterable"](ALL.items(), store.pushing())
    assert store.calls == len(ALL) and store.held == ALL
    assert usual["pull_objects"](list(ALL), store.pulling()) == ALL
    assert store.calls == 2 * len(ALL)


@pytest.mark.slow
def test_a_serverapp_waits_for_pieces_as_long_as_it_is_told():
    """The patch comes before the first import of the module that fetches replies."""
    code = (
        "from simulations import flower_commands\n"
        "from simulations.deployment import supernode\n"
        "flower_commands.run = lambda *_: None\n"
        "supernode.server_executor([])\n"
        "from flwr.superlink.grid import http_grid\n"
        "print(http_grid.pull_objects.keywords['max_time'], http_grid.push_objects.__globals__"
        "['push_object_contents_from_iterable'].__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["60.0", supernode.__name__], done.stderr


PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


def names_in(tree):
    """Flower's modules and their members that a source imports; a module that is imported by a
    string counts too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def module_of(name):
    """The private module of Flower with this name, or with this member."""
    if not re.fullmatch(r"flwr(\.\w+)+", name) or re.match("|".join(PUBLIC) + r"(\.|$)", name):
        return None
    parent = name.rpartition(".")[0]
    return name if find_spec(parent) and _is_module(name) else parent


def _is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return False


def private_modules():
    found = {}
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        source = file.read_text()
        for name in names_in(ast.parse(source)) if "flwr" in source else ():
            if module := module_of(name):
                found.setdefault(module, set()).add(str(file.relative_to(ROOT)))
    return found


def test_the_docs_name_all_private_modules_and_their_number():
    text = (ROOT / "docs" / "deployment.md").read_text()
    section = text.partition("## Private parts of Flower")[2].partition("\n## ")[0]
    found = private_modules()
    assert set(re.findall(r"`(flwr\.[\w.]+)`", section)) - set(PUBLIC) == set(found)
    (number,) = re.findall(r"imports (\d+) private modules", section)
    assert int(number) == len(found) < 15
    for file in set().union(*found.values()):
        assert f"`{file.removeprefix('simulations/')}`" in section, file


def test_flower_has_no_public_interface_for_operators():
    """If this fails, a new version of Flower may no longer need `Control`."""
    public = [name for part in (flwr.app, flwr.clientapp, flwr.serverapp) for name in dir(part)]
    assert not [name for name in public if re.search("control|superlink|register", name.lower())]
