# SPDX-License-Identifier: Apache-2.0
"""The serial engine, Flower's, secure runs, and resumed ones."""

import itertools
import multiprocessing
import os
import signal
import time
import traceback

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from clients.steps.sgd import Sgd
from fedrec.errors import ClientError
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback
from simulations import runner
from simulations.engines import grid as flwr_private
from simulations.engines.grid import SerialGrid, identify_server, number
from tests.runs import assert_close, assert_same_run, resumed
from tests.simulations.helpers import listening_below

# The serial grid: nodes in this process that do not affect each other.


def contexts(count):
    return [
        Context(1, 2 + place, {"partition-id": place}, RecordDict(), {}) for place in range(count)
    ]


def shared():
    arrays = ArrayRecord({"w": Array(np.arange(3, dtype=np.float32))})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"rate": 0.5, "list": [1, 2]})})


@pytest.fixture
def vandal():
    """Its ClientApp reports its message, then edits every part of it in place."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays, config = message.content["arrays"], message.content["config"]
        given = {
            "sum": float(arrays["w"].numpy().sum()),
            "rate": config["rate"],
            "list": list(config["list"]),
        }
        arrays["w"].numpy()[:] = -1
        arrays["w"] = Array(np.full(3, 100, np.float32))
        config["rate"] = 99.0
        config["list"].append(3)
        message.content["more"] = ConfigRecord()
        context.state["count"] = ConfigRecord({"n": len(context.state) + 1})
        place = context.node_config["partition-id"]
        return Message(
            RecordDict({"metrics": MetricRecord({**given, "place": place})}), reply_to=message
        )

    return SerialGrid(app, contexts(3))


def test_a_client_that_edits_its_message_does_not_change_the_others(vandal):
    content = shared()
    replies = vandal.send_and_receive(
        [Message(content, node, "train") for node in vandal.get_node_ids()]
    )
    for place, reply in enumerate(replies):
        assert dict(reply.content["metrics"]) == {
            "sum": 3.0,
            "rate": 0.5,
            "list": [1, 2],
            "place": place,
        }
    assert content["arrays"]["w"].numpy().tolist() == [0, 1, 2]
    assert set(content) == {"arrays", "config"}
    assert dict(content["config"]) == {"rate": 0.5, "list": [1, 2]}


def test_replies_come_in_the_order_of_the_messages(vandal):
    # more than ten messages, so that numerical and alphabetical order differ
    nodes = [4, 2, 3, 2, 4] * 6
    replies = vandal.send_and_receive([Message(shared(), node, "train") for node in nodes])
    assert [reply.metadata.src_node_id for reply in replies] == nodes
    assert vandal.send_and_receive([]) == []


def test_messages_can_be_pushed_and_pulled(vandal):
    first = vandal.push_messages([Message(shared(), node, "train") for node in (2, 3)])
    second = vandal.push_messages([Message(shared(), 4, "train")])
    assert len({*first, *second}) == 3
    (reply,) = vandal.pull_messages(second)
    assert reply.metadata.reply_to_message_id == second[0]
    assert {reply.metadata.reply_to_message_id for reply in vandal.pull_messages(first)} == set(
        first
    )
    assert list(vandal.pull_messages(first)) == []


def test_an_error_comes_through_with_its_traceback(identity):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return taste(message)

    def taste(message):
        raise ZeroDivisionError("no taste")

    grid = SerialGrid(app, contexts(1))
    with pytest.raises(ZeroDivisionError, match="no taste") as caught:
        grid.send_and_receive([Message(shared(), 2, "train")])
    assert "taste" in {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}


# The flower engine: a real `flwr run` gives the serial engine's numbers, and leaves nothing behind.


class Recorder(Callback):
    def __init__(self):
        self.told = []

    def on_start(self, run, first_round, rounds):
        self.told.append((first_round, rounds))

    def after_round(self, row, seconds):
        self.told.append(int(row["round"]))
        return False

    def on_end(self, result):
        self.told.append("end")


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_flower_gives_the_serial_engines_numbers(run_tiny, monkeypatch, tmp_path, leftovers):
    serial = run_tiny(output="serial")
    monkeypatch.setenv("FEDREC_TEST_MARK", str(tmp_path))
    recorder = Recorder()
    result = run_tiny("engine.name=flower", output="flower", callbacks=[recorder])
    assert RunFolder(result.folder).status() == {"state": "finished", "round": 2}
    assert_same_run(result, serial, ids=False, atol=1e-6)
    assert result.metrics == serial.metrics
    assert recorder.told == [(1, 2), 1, 2, "end"]
    assert leftovers(f"FEDREC_TEST_MARK={tmp_path}") == []


class Interrupt(Callback):
    """Looks at the engine's processes after the first round, and ends the run as a signal does."""

    def after_round(self, row, seconds):
        self.own, self.others = listening_below(os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        return False


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_interrupted_run_leaves_no_process_and_was_reached_from_this_machine_only(
    run_tiny, monkeypatch, tmp_path, leftovers
):
    """The executor and the simulation are in a session of their own and would finish the run."""
    monkeypatch.setenv("FEDREC_TEST_MARK", str(tmp_path))
    watch = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        run_tiny("engine.name=flower", "rounds=100000", output="flower", callbacks=[watch])
    assert leftovers(f"FEDREC_TEST_MARK={tmp_path}") == []
    status = RunFolder(tmp_path / "flower").status()
    assert status["state"] == "interrupted" and 1 <= status["round"] < 100000
    assert len(watch.own) and not watch.others, watch.others


# The private parts of Flower that our grids use. If a new version fails here, fix
# `simulations/engines/grid.py`.


@pytest.fixture
def nobody(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


@pytest.mark.usefixtures("identity")
def test_the_identity_of_a_real_flower_task_is_kept(nobody):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 77, 88, 99
    identify_server()
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (77, 88, 99)


@pytest.mark.usefixtures("identity")
def test_a_message_can_be_numbered_and_its_reply_names_the_number():
    message = Message(RecordDict(), 2, "train")
    assert message.metadata.message_id == "", "flwr: messages now number themselves"
    number(message, "message-5")
    assert message.metadata.message_id == "message-5", (
        "flwr: Metadata keeps the message id elsewhere"
    )
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.reply_to_message_id == "message-5" and reply.metadata.src_node_id == 2


@pytest.mark.usefixtures("identity")
def test_the_error_code_is_flowers():
    from flwr.common.constant import ErrorCode

    assert ErrorCode.CLIENT_APP_RAISED_EXCEPTION == flwr_private.CLIENT_RAISED
    assert Error(flwr_private.CLIENT_RAISED, "x").reason == "x"


# Whole runs under secure aggregation: the same numbers as without it, on every engine; impossible
# combinations are refused.

SECURE = "secure-aggregation=true"
THREE = "engine.nodes=3"
QUICK = ("evaluation.every=0", "evaluation.final-users=1", "evaluation.fine-tune={epochs=0}")
PLANS = {
    "none": (),
    "weighted": ("strategy.name=fedavg",),
    "distributed": (
        "privacy={clip-norm=0.5, noise-multiplier=1.0, placement='distributed', max-dropouts=2}",
    ),
    "local": ("privacy={clip-norm=0.5, noise-multiplier=1.0, placement='local'}",),
    "laplace": ("privacy={clip-norm=0.5, noise-multiplier=1.0, mechanism='laplace', delta=0.0}",),
    "two phases": ("model.item-bias=true", "strategy={name='popularity-start'}", "rounds=3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_same_parameters_as_without(run_tiny, plan):
    """The float32 additions are exact here, and the step of the fixed point is far smaller."""
    plain = run_tiny(*PLANS[plan], *QUICK, THREE, output="plain")
    secure = run_tiny(*PLANS[plan], *QUICK, THREE, SECURE, output="secure")
    assert_close(secure.parameters, plain.parameters, rtol=1e-6, atol=1e-8)
    assert sum(float(np.abs(value).sum()) for value in plain.parameters.values()) > 1
    for column in ("num-clients", "num-examples", "loss"):
        if column in plain.rounds:
            np.testing.assert_allclose(secure.rounds[column], plain.rounds[column], atol=1e-5)
    if "epsilon" in plain.rounds:
        assert secure.rounds["epsilon"].tolist() == plain.rounds["epsilon"].tolist()


@pytest.mark.slow
def test_an_interrupted_run_continues(run_tiny):
    settings = (*QUICK, THREE, SECURE, "rounds=3")
    whole = run_tiny(*settings, output="whole")
    found = resumed(run_tiny, *settings, after=1)
    assert_close(found.parameters, whole.parameters, rtol=1e-6, atol=1e-8)
    assert len(found.rounds) == 3


def test_a_sum_without_room_names_the_setting(run_tiny):
    with pytest.raises(ClientError, match=r"too large(.*\n)*.*secure-aggregation.largest"):
        run_tiny(*QUICK, THREE, "secure-aggregation={largest=1e-12}")


# A run that is killed or interrupted in the middle of a round ends like an uninterrupted one.

FORK = multiprocessing.get_context("fork")  # which need not import everything once more


@pytest.fixture(scope="module")
def table(tiny_experiment):
    """Every client has a private output layer, so the private state must survive as well. The step
    is called for one client after the other."""
    table = {**tiny_experiment(), "rounds": 4}
    table["sampler"]["cohort"] = 12
    table["engine"]["path"] = "reference"
    table["step"] |= {"private-parameters": ["layer1.*"]}
    return table


def stuck(table, run):
    """Run an experiment that waits for ever at the third client after round 2."""
    batches, calls = Sgd.batches, itertools.count(1)

    def stuck_batches(step, data, random):
        if RunFolder(run).status()["round"] == 2 and next(calls) == 3:
            (run.parent / "stuck").touch()
            time.sleep(600)
        return batches(step, data, random)

    Sgd.batches = stuck_batches  # pyright: ignore[reportAttributeAccessIssue]
    runner.run(table, output=run)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sign", "status"),
    [(signal.SIGKILL, "running"), (signal.SIGINT, "interrupted")],
    ids=["kill -9", "ctrl-c"],
)
def test_a_broken_run_ends_with_the_numbers_of_an_unbroken_one(table, tmp_path, sign, status):
    unbroken = runner.run(table, output=tmp_path / "unbroken")
    run = tmp_path / "run"
    process = FORK.Process(target=stuck, args=(table, run))
    process.start()
    deadline = time.monotonic() + 60
    try:
        while not (tmp_path / "stuck").exists():
            assert process.is_alive() and time.monotonic() < deadline, "it did not come to round 3"
            time.sleep(0.05)
        os.kill(process.pid, sign)
        process.join(30)
        assert process.exitcode not in (0, None)
    finally:
        process.kill()
        process.join()
    assert RunFolder(run).status() == {"state": status, "round": 2}
    result = runner.resume(run)
    assert RunFolder(run).status() == {"state": "finished", "round": 4}
    assert_same_run(result, unbroken)
    assert result.metrics == unbroken.metrics
