# SPDX-License-Identifier: Apache-2.0
"""Two nodes whose users' data differ answer an order alike wherever their users have protection: in
type, names, shapes, size, counts and error text. All that differs are the numbers that have noise
or masks. When an answer leaves is tested in `test_policy.py`."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message, RecordDict

from clients.app import app
from clients.steps.dpvae import DpVae
from clients.steps.sgd import Sgd
from fedrec.data.client_data import ClientData
from fedrec.errors import FedrecError
from fedrec.privacy.protection import Protection
from fedrec.protocol.messages import HELLO, pack_evaluate, pack_train
from fedrec.protocol.orders import EvaluateOrder
from fedrec.protocol.zero_copy import from_the_network, to_record, zero_copy_arrays
from tests.clients.device.test_policy import LOCAL, local, victim  # noqa: F401  (a fixture)
from tests.server.privacy.test_secure_sums import Federation

pytestmark = pytest.mark.usefixtures("identity")


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
            content = pack_train(to_record(theta), own)
            found.append(answer(node, "train", content))
    (one, numbers), (one_alone, _), (other, others), (other_alone, _) = found
    assert one == other and one_alone == other_alone
    assert isinstance(one, dict) and numbers.keys() == others.keys()
    for name, value in numbers.items():  # every number has noise
        assert value.dtype == np.float32 and (value != 0).all() and (others[name] != value).all()


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
            pack_train(to_record(theta), node.order()),
            pack_train(to_record(theta), node.order(99, protection=good.protection)),
            pack_train(to_record({n: v.astype(np.float32) for n, v in broken.items()}), good),
            pack_train(to_record({n: v[:1] for n, v in theta.items()}), good),
        ]
        for key, value in (("clients", ["x"]), ("step", "[" * 100_000), ("x", 1)):
            content = pack_train(to_record(theta), good)
            content["config"][key] = value
            orders.append(content)
        texts = [answer(node, "train", content) for content in orders]
        texts.append(
            answer(node, "evaluate", pack_evaluate(to_record(theta), EvaluateOrder(99, None)))
        )
        assert all(isinstance(text, str) for _, text in texts)
        found.append(
            [*texts, form_of(app(Message(RecordDict(), 2, HELLO), node.context()).content)]
        )
    assert found[0] == found[1]


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
