# SPDX-License-Identifier: Apache-2.0
"""What a device answers: agreed protection, own data, received parameters and times."""

import dataclasses
import math
import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message, RecordDict
from scipy.optimize import brentq
from scipy.stats import norm

from clients.app import _ended_after, _seconds_left, app
from clients.device.node import _check_parameters
from clients.device.policy import Policy
from clients.node import Node
from clients.round import train_clients
from clients.steps.descent import Update, as_block
from clients.steps.sgd import Sgd
from clients.steps.vae import DpVae, DpVaeConfig
from clients.sums import UpdateSum
from fedrec.data.client_data import ClientData
from fedrec.errors import ClientError, FedrecError, RefusalError
from fedrec.experiment.phases import phases_of
from fedrec.experiment.schema import load
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import HELLO, INITIAL, EvaluateOrder, TrainOrder, pack_order
from fedrec.protocol.secure import MaskOrder
from fedrec.protocol.serialization import from_the_network, to_record, zero_copy_arrays
from fedrec.protocol.updates import dense_change
from fedrec.runtime.process import Fork
from server.privacy.guard import PhasePlans
from tests.clients.device.test_device_node import cut, own
from tests.clients.device.test_policy import LOCAL, local, victim  # noqa: F401  (a fixture)
from tests.server.conftest import Federation

# The protection that a node requires, against the server's plan and the analytic Gaussian
# mechanism, also for nested strategies.

NAMES = ("item.id", "item.bias")
SGD = "step={name='sgd', epochs=1}"
LARGE = "sampler={name='fixed-size', cohort=12}"
POPULARITY = ("strategy={name='popularity-start'}", "model.item-bias=true")
TWO_STAGES = (f"strategy={{name='two-stage', stage-one={{rounds=2, {SGD}, {LARGE}}}}}",)
NESTED = (
    "strategy={name='popularity-start', main={name='two-stage', stage-one={rounds=2,"
    f" {SGD}, {LARGE}}}}}}}",
    "model.item-bias=true",
)
PHASES = "privacy.phases={popularity={clip-norm=2.0, noise-factor=3.0}}"
SECOND_PHASE = "privacy.phases={stage-one={clip-norm=2.0, noise-factor=0.5}}"


def refused(experiment, phase, protection):
    """Whether a node that takes part in the experiment refuses an order of a phase."""
    number = experiment.rounds if phase.last is None else phase.last
    order = TrainOrder(number, np.arange(3), step=dict(phase.step), protection=protection)
    try:
        Policy().check_order(experiment, phases_of(experiment), order, NAMES)
    except RefusalError:
        return True
    return False


@pytest.mark.parametrize(
    "privacy",
    [
        "{clip-norm=0.1, noise-multiplier=1.5, placement='local'}",
        "{clip-norm=0.1, noise-multiplier=1.5, placement='distributed', max-dropouts=2}",
        "{clip-norm=0.1, noise-multiplier=0.75, placement='local'}",
        "{clip-norm=0.1, noise-multiplier=1.5, mechanism='laplace', placement='local'}",
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [(), POPULARITY, (*POPULARITY, PHASES), TWO_STAGES, (*TWO_STAGES, SECOND_PHASE), NESTED],
    ids=("one phase", "popularity", "popularity apart", "stages", "stages apart", "nested"),
)
def test_what_the_server_orders_in_each_phase_is_the_least_that_is_accepted(
    tiny_experiment, privacy, strategy
):
    changes = (f"privacy={privacy}", "rounds=4", "privacy.parameters=['item.*']")
    experiment = load(tiny_experiment(), [*changes, *strategy])
    plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
    phases = phases_of(experiment)
    assert {phase.name for phase in phases} == set(plans)
    for phase in phases:
        ordered = plans[phase.name].protection(NAMES)
        less = dataclasses.replace(ordered, noise_scale=0.999 * ordered.noise_scale)
        wider = dataclasses.replace(ordered, clip_norm=1.001 * ordered.clip_norm)
        assert ordered.noise_scale > 0 and not refused(experiment, phase, ordered)
        assert refused(experiment, phase, less) and refused(experiment, phase, wider)


def test_the_least_noise_of_all_phases_together_costs_the_target_epsilon(tiny_experiment):
    """One round of counts (sqrt(2) S, three times the multiplier) and three of updates (2 S)."""
    privacy = "privacy={clip-norm=0.1, epsilon=3.0, delta=1e-5, placement='local'}"
    experiment = load(tiny_experiment(), [privacy, "rounds=4", *NESTED, PHASES])
    moved = {"popularity": math.sqrt(2) * 2.0, "stage-one": 2 * 0.1, "main": 2 * 0.1}
    multiplier = {}
    for phase in phases_of(experiment):
        clip = 2.0 if phase.name == "popularity" else 0.1

        def accepted(scale, phase=phase, clip=clip):
            return -1 if refused(experiment, phase, Protection(clip, 2, NAMES, scale)) else 1

        least: Any = brentq(accepted, 1e-3, 1e3, xtol=1e-9)
        multiplier[phase.name] = float(least) / moved[phase.name]
    assert multiplier["popularity"] == pytest.approx(3 * multiplier["main"], rel=1e-5)
    assert multiplier["stage-one"] == pytest.approx(multiplier["main"], rel=1e-5)
    mu = math.sqrt(multiplier["popularity"] ** -2 + 3 * multiplier["main"] ** -2)
    delta = norm.cdf(mu / 2 - 3.0 / mu) - math.exp(3.0) * norm.cdf(-mu / 2 - 3.0 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("strategy", [(), POPULARITY, NESTED], ids=("one", "popularity", "nested"))
def test_noise_that_is_calibrated_for_all_clients_is_accepted(tiny_experiment, strategy):
    privacy = "privacy={clip-norm=0.1, epsilon=3.0, placement='local'}"
    experiment = load(tiny_experiment(), [*strategy, privacy, "rounds=4"])
    plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
    for phase in phases_of(experiment):
        assert not refused(experiment, phase, plans[phase.name].protection(NAMES))


# Two nodes whose users' data differ answer an order alike wherever their users have protection: in
# type, names, shapes, size, counts and error text. All that differs are the numbers that have noise
# or masks. When an answer leaves is tested in `test_policy.py`.


def rows_of(items, row):
    """The row once for each item."""
    return pd.DataFrame([{**row, "item": item, "time": 0} for item in items])


# a user without any row is no client, which a node does not hide
VARIANTS = {
    "more rows": lambda own, row: pd.concat([own, rows_of(set(range(25)) - set(own["item"]), row)]),
    "other items": lambda own, row: rows_of(sorted(set(range(25)) - set(own["item"])), row),
    "one row": lambda own, row: own[:1],
    "nothing liked": lambda own, row: own.assign(rating=1.0),
    "other features": lambda own, row: own.assign(gender="M" if row["gender"] == "F" else "F"),
    "unknown items": lambda own, row: own.assign(
        item=[row["item"], *map("x{}".format, own.index[1:])]
    ),
    "rows twice": lambda own, row: pd.concat([own, own]),
    "failing": lambda own, row: own,
}


def vary(folder, how):
    """Change the training rows of one user of a node; returns the user."""
    table = pd.read_csv(folder / "data.csv", dtype={"item": object})
    table["item"] = table["item"].map(lambda item: int(item) if str(item).isdigit() else item)
    user = int(table.loc[table["part"] == "train", "user"].iloc[0])
    chosen = (table["user"] == user) & (table["part"] == "train")
    own = VARIANTS[how](table[chosen], table[chosen].iloc[0].to_dict())
    pd.concat([own, table[~chosen]]).to_csv(folder / "data.csv", index=False)
    return user


def fail_for(monkeypatch, user):
    """Make the training of a user fail in whatever step."""
    for step in (Sgd, DpVae):
        batches = step.batches

        def work(self, *given, batches=batches):
            data = next(one for one in given if isinstance(one, ClientData))
            if data.client == user and len(data.items):
                raise ZeroDivisionError
            return batches(self, *given)

        monkeypatch.setattr(step, "batches", work)


def form_of(content):
    """All of an answer but the numbers of its arrays."""
    arrays = {
        (record, name): (value.dtype, value.shape, len(value.data), value.stype)
        for record, own in content.array_records.items()
        for name, value in own.items()
    }
    return {
        "records": list(content),
        "arrays": arrays,
        "metrics": {name: dict(own) for name, own in content.metric_records.items()},
        "config": {name: dict(own) for name, own in content.config_records.items()},
    }


def answer(node, kind, content):
    """The form of a node's answer as it leaves, and the numbers in it; or the error's text."""
    try:
        reply = app(Message(content, 2, kind), node.context())
    except FedrecError as error:
        return type(error), str(error)
    form = form_of(reply.content)
    return form, zero_copy_arrays(from_the_network(reply.content)["arrays"])


def of_both(made, monkeypatch, how, *overrides):
    """Two nodes in turn, of which the second has other rows of a user, and that user."""
    nodes = made(*overrides), made(*overrides)
    user = vary(nodes[1].folder, how)
    for node in nodes:
        if how == "failing" and node is nodes[1]:
            fail_for(monkeypatch, user)
        yield node, user


SYSTEMS = {
    "gaussian": ((LOCAL, "sampler.name=full"), local),
    "laplace": (
        (LOCAL.replace("}", ', mechanism="laplace"}'), "sampler.name=full"),
        lambda names: Protection(0.5, 1, tuple(names), noise_scale=1.0, mechanism="laplace"),
    ),
    "noise of the step": (
        ("model.name=vae", "step.name=dpvae", "step.noise=secure", "step.budgets=equal"),
        lambda names: None,
    ),
}


@pytest.mark.usefixtures("identity")
@pytest.mark.slow
@pytest.mark.parametrize("how", VARIANTS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_answers_with_noise_have_one_form(victim, monkeypatch, system, how):  # noqa: F811
    overrides, protection = SYSTEMS[system]
    found = []
    for node, user in of_both(victim, monkeypatch, how, *overrides):
        theta = node.theta()
        order = node.order(protection=protection(names=theta))
        for number, clients in ((1, np.arange(24)), (2, np.array([user]))):
            own = replace(order, round=number, clients=clients)
            content = pack_order(own, to_record(theta))
            found.append(answer(node, "train", content))
    (one, numbers), (one_alone, _), (other, others), (other_alone, _) = found
    assert one == other and one_alone == other_alone
    assert isinstance(one, dict) and numbers.keys() == others.keys()
    for name, value in numbers.items():  # every number has noise
        assert value.dtype == np.float32 and (value != 0).all() and (others[name] != value).all()


@pytest.mark.usefixtures("identity")
@pytest.mark.slow
@pytest.mark.parametrize("how", VARIANTS)
def test_refusals_have_one_text(victim, monkeypatch, how):  # noqa: F811
    """Of orders that the policy refuses, of parameters, and of malformed ones."""
    found = []
    for node, _ in of_both(victim, monkeypatch, how, LOCAL, "sampler.name=full"):
        theta = node.theta()
        good = node.order(protection=local(names=theta))
        table = next(name for name in theta if name.startswith("item"))
        broken = {**theta, table: np.where(np.arange(len(theta[table]))[:, None] == 3, np.nan, 0)}
        orders = [
            pack_order(node.order(), to_record(theta)),
            pack_order(node.order(99, protection=good.protection), to_record(theta)),
            pack_order(good, to_record({n: v.astype(np.float32) for n, v in broken.items()})),
            pack_order(good, to_record({n: v[:1] for n, v in theta.items()})),
        ]
        for key, value in (("clients", ["x"]), ("step", "[" * 100_000), ("x", 1)):
            content = pack_order(good, to_record(theta))
            content["config"][key] = value
            orders.append(content)
        texts = [answer(node, "train", content) for content in orders]
        texts.append(
            answer(node, "evaluate", pack_order(EvaluateOrder(99, None), to_record(theta)))
        )
        assert all(isinstance(text, str) for _, text in texts)
        found.append(
            [*texts, form_of(app(Message(RecordDict(), 2, HELLO), node.context()).content)]
        )
    assert found[0] == found[1]


@pytest.mark.usefixtures("identity")
@pytest.mark.slow
@pytest.mark.parametrize("how", VARIANTS)
def test_masked_answers_have_one_form(tiny_experiment, tmp_path, monkeypatch, how):
    """Of every message of a session of secure sums, and of the sum only the numbers differ."""
    heard, user = [], None
    for place in range(2):
        output = tmp_path / str(place)
        output.mkdir()
        if place:
            original = Federation.__init__.__globals__["cut"]

            def cut(experiment, folders, original=original):
                nonlocal user
                original(experiment, folders)
                user = vary(folders[0], how)

            monkeypatch.setitem(Federation.__init__.__globals__, "cut", cut)
        made = Federation(tiny_experiment(), output, 3, real=True)
        if place and how == "failing":
            fail_for(monkeypatch, user)
        counted = made.secure()
        assert (counted.clients, counted.weight) == (18, 18)
        heard.append([(at, kind, form_of(reply.content)) for at, kind, reply in made.grid.heard])
    for one, other in zip(*heard, strict=True):
        assert [*one[:2], *private(one)] == [*other[:2], *private(other)]


def private(heard):
    """The form without keys and shares, which are random; their lengths stay, but for the proof of
    a key: its signature is one or two bytes shorter by chance."""
    form = heard[2]
    config = {
        record: {name: size_of(value) for name, value in own.items() if name != "proof"}
        for record, own in form["config"].items()
    }
    return form["records"], form["arrays"], form["metrics"], config


def size_of(value):
    return len(value) if isinstance(value, bytes) else value


# Parameters by which a server would learn a client's items from who answers are refused by every
# node alike, before a client's data are read.

THETA = {"table": np.ones((4, 2), np.float32), "bias": np.zeros(1, np.float32)}
SHAPES = {name: value.shape for name, value in THETA.items()}


def with_row(value):
    table = THETA["table"].copy()
    table[2] = value
    return {**THETA, "table": table}


@pytest.mark.parametrize(
    "hostile",
    [
        with_row(np.nan),
        with_row(np.inf),
        with_row(-np.inf),
        with_row(-2e9),
        {**THETA, "table": THETA["table"][:3]},
        {**THETA, "table": THETA["table"].astype(np.float64)},
        {"table": THETA["table"]},
        {**THETA, "more": THETA["bias"]},
    ],
)
def test_all_others_are_refused(hostile):
    _check_parameters(THETA, SHAPES)
    with pytest.raises(RefusalError, match="invalid parameters in an order"):
        _check_parameters(hostile, SHAPES)


@pytest.mark.parametrize("path", ["kernel", "blocks", "reference"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_clients_whose_training_diverges_send_their_noise_alone(load_tiny, path, value):
    """Whether or not they changed the row of the table that is not finite."""
    node = Node(load_tiny(f"engine.path={path}", "rounds=1"), 0, 1, None)
    theta = {name: start.numpy().copy() for name, start in node.initial().items()}
    table = next(name for name in theta if name in node.model.item_tables)
    theta[table][3] = value
    protection = Protection(0.5, 2, tuple(theta), noise_scale=1.0)
    order = TrainOrder(1, np.arange(24), "uniform", protection=protection)
    answer = train_clients(node, theta, order)
    start = {name: torch.from_numpy(value) for name, value in theta.items()}
    zeros = UpdateSum(theta, (), "uniform", protection, node.noise, 1)
    for client in range(24):
        zeros.add_block([client], as_block(start, [Update({})]))
    assert answer.clients == 24
    noise = zeros.sum()
    for name in theta:
        assert np.isfinite(dense_change(answer.total[name])).all()
    # nobody's update of that row is finite
    found, expected = (dense_change(one.total[table])[3] for one in (answer, noise))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.fixture
def real_node(load_tiny, tmp_path):
    """Makes a node with all users of an experiment; returns it and the initial parameters."""

    def make(*overrides):
        experiment = load_tiny(*overrides)
        cut(experiment, [tmp_path])
        node = own(experiment, tmp_path, numbers=True)
        return node, {name: start.numpy().copy() for name, start in node.initial().items()}

    return make


def failing(monkeypatch, step, client):
    """Makes the work of a client fail; returns the clients that were worked on, in order."""
    worked = []

    def watched(original):
        def work(self, *given):
            data = next(one for one in given if isinstance(one, ClientData))
            if len(data.items):
                worked.append(data.client)
                if data.client == client:
                    raise ZeroDivisionError
            return original(self, *given)

        return work

    monkeypatch.setattr(step, "batches", watched(step.batches))
    return worked


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_client_whose_training_fails_counts_as_zero_on_a_real_node(
    real_node, monkeypatch, path, noise
):
    """Under protection; the server sees neither an error nor a smaller count, nor a second training
    in the duration."""
    node, theta = real_node(f"engine.path={path}")
    clients = node.training[:4]
    worked = failing(monkeypatch, Sgd, clients[2])
    protection = Protection(0.5, 2, tuple(theta), noise_scale=noise)
    answer = train_clients(node, theta, TrainOrder(1, clients, "uniform", protection=protection))
    assert answer.clients == 4 and answer.weight == 4
    assert worked == clients.tolist()
    bare = TrainOrder(1, clients, "uniform")
    with pytest.raises(ClientError):  # a plain sum, whose failure may be told
        train_clients(node, theta, bare)


@pytest.mark.parametrize("path", ["auto", "blocks", "reference"])
def test_a_client_that_diverges_in_a_masked_sum_counts_as_zero_on_a_real_node(
    real_node, caplog, path
):
    """Otherwise the sum could not be encoded, and all clients of the node would be missing."""
    node, theta = real_node(f"engine.path={path}")
    features = node.population.client(int(node.training[2])).features
    rows = [name for name in theta if name.startswith("user")]
    for name, codes in zip(rows, features, strict=True):
        theta[name][codes] = np.nan  # of the user features of some clients
    masked = TrainOrder(1, node.training, "uniform", secure=MaskOrder(b"", b"", b""))
    answer = train_clients(node, theta, masked)
    assert answer.clients == answer.weight == len(node.training) and "diverged" in caplog.text
    assert all(np.isfinite(dense_change(answer.total[n])).all() for n in theta)


def test_a_block_that_fails_is_not_trained_again_on_a_real_node(real_node, monkeypatch):
    """Its clients are trained alone, so it is known which one fails."""
    node, theta = real_node("engine.path=blocks")
    clients = node.training[:4]
    blocks = []

    def train_block(self, parameters, block, client_params=None):
        blocks.append(len(block))
        raise ZeroDivisionError

    monkeypatch.setattr(Sgd, "train_block", train_block)
    protection = Protection(0.5, 2, tuple(theta))
    answer = train_clients(node, theta, TrainOrder(1, clients, "uniform", protection=protection))
    assert blocks == [1, 1, 1, 1] and answer.clients == 4
    assert not any(dense_change(answer.total[n]).any() for n, v in theta.items())


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_client_that_fails_in_a_step_with_own_noise_sends_the_noise_alone(
    real_node, monkeypatch, path
):
    """The node answers, and all clients are in the sum."""
    vae = ("model.name=vae", "step.name=dpvae", "step.noise=secure", "step.budgets=equal")
    node, theta = real_node(*vae, f"engine.path={path}")
    clients = node.training[:4]
    worked = failing(monkeypatch, DpVae, clients[2])
    every = train_clients(node, theta, TrainOrder(1, clients, "uniform"))
    one = train_clients(node, theta, TrainOrder(2, clients[2:3], "uniform"))
    assert worked == [*clients.tolist(), clients[2]]
    assert (every.clients, every.examples, one.clients, one.examples) == (4, 4, 1, 1)
    config = node.step(node.experiment.step).config
    std = config.noise_multiplier(0) * config.clip_norm * config.learning_rate
    noise = np.concatenate([dense_change(one.total[n]).ravel() for n, v in theta.items()])
    assert 0.8 * std < noise.std() < 1.2 * std


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_own_noise_of_a_client_covers_a_gradient_that_diverged(value):
    step = object.__new__(DpVae)
    step.config = DpVaeConfig(noise="reproducible")

    def uploaded(mean):
        draws = np.random.default_rng(1)
        return step.uploaded(mean, 1.0, 3, draws)

    diverged = torch.zeros(3)
    diverged[0] = value
    np.testing.assert_array_equal(uploaded(diverged), uploaded(torch.zeros(3)))


# Work on a message ends at its time limits.


def status_after(processor, elapsed, work):
    def limited():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest's, as on a node
        with _ended_after(processor, elapsed):
            work()

    return os.waitpid(Fork(limited).pid, 0)[1]


def busy(seconds=60.0):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("limits", "work", "ended"),
    [
        ((0.01, 0), busy, signal.SIGVTALRM),
        ((0, 0.01), busy, signal.SIGALRM),
        ((60, 0.01), lambda: time.sleep(60), signal.SIGALRM),
        ((60.0, 60.0), lambda: busy(0.02), 0),
        ((0, 0), lambda: busy(0.02), 0),
    ],
)
def test_a_process_that_works_longer_is_ended_and_no_other(limits, work, ended):
    status = status_after(*limits, work)
    assert os.WTERMSIG(status) == ended and os.WIFSIGNALED(status) == bool(ended)


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (1000.0, 120.0),
        (1050.0, 70.0),
        (1119.0, 1.0),
        (900.0, 120.0),  # this clock is behind
        (2000.0, 120.0),  # this clock is ahead
    ],
)
def test_an_answer_is_awaited_until_its_message_is_invalid(now, left):
    assert _seconds_left(1000.0, 120.0, now) == left


@pytest.mark.usefixtures("identity")
def test_work_on_a_message_ends_with_the_time_that_the_server_waits(victim, monkeypatch):  # noqa: F811
    """And after an hour of processor time."""
    limits = []

    def setitimer(timer, seconds, interval=0.0):
        limits.append((timer, seconds))
        return 0.0, 0.0

    monkeypatch.setattr("clients.app.signal.setitimer", setitimer)
    monkeypatch.setattr("clients.app.time.time", lambda: 1030.0)
    message = Message(RecordDict(), 2, INITIAL, ttl=100.0)
    message.metadata.created_at = 1000.0
    app(message, victim().context())
    work = [(signal.ITIMER_VIRTUAL, 3600.0), (signal.ITIMER_REAL, 70.0)]
    assert limits == [*work, *((timer, 0.0) for timer, _ in work)]
