# SPDX-License-Identifier: Apache-2.0
"""A node with its own data: it holds the same as a simulated node, under client numbers, and
refuses invalid orders."""

import json
import sqlite3
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from clients.app import app, node_of
from clients.device.node import DeviceNode
from clients.device.own_data import read_own
from clients.device.policy import Policy
from clients.evaluation import evaluate_clients
from clients.node import Node
from clients.participation import Limits, Participation
from clients.round import train_clients
from fedrec.data.population import Population
from fedrec.data.reader import Catalogue
from fedrec.errors import ClientError, DataError, ExperimentError, RefusalError
from fedrec.evaluation.tables import GROUP, Evaluated
from fedrec.experiment.schema import load
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import (
    INITIAL,
    ITEMS,
    EvaluateOrder,
    ItemQuery,
    TrainOrder,
    pack_order,
    read_arrays,
    unpack_sum,
    unpack_table,
)
from fedrec.protocol.serialization import from_the_network, to_record
from fedrec.protocol.updates import dense_change
from fedrec.rng import Secure
from simulations.deployment.layout import Authority
from simulations.deployment.shards import cut
from tests import systems

NUMBERED = {"numbers": True}


@pytest.fixture
def shards(load_tiny, tmp_path):
    """The folders of two nodes with the shards of the tiny experiment."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    cut(load_tiny(), folders)
    return folders


def files_of(folder):
    """Files in the settings of a node."""
    names = {"private-dir": "state", "data": "data.csv", "catalogue": "catalogue.json"}
    return {key: folder / name for key, name in names.items()}


def own(experiment, folder, data=None, **settings):
    """A node with its own data, and settings of its owner."""
    settings = {name.replace("_", "-"): value for name, value in settings.items()}
    files = files_of(folder) | ({} if data is None else {"data": data})
    return DeviceNode(experiment, experiment.digest()[:16], files | settings)


def certify(folder):
    """Give a node an identity, as `fedrec deploy init` does."""
    authority = Authority.create("test")
    issued = authority.issue("node-1")
    for name, text in (("signing.key", issued.key), ("signing.crt", issued.certificate)):
        (folder / name).write_bytes(text)
    (folder / "ca.crt").write_bytes(authority.issued.certificate)


def write(folder, *lines, header="user,item,rating,time"):
    (folder / "own.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder / "own.csv"


def assert_same(one, other, *names):
    for name in names:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_shard_is_what_a_simulated_node_holds_of_its_clients(load_tiny, shards):
    experiment = load_tiny()
    for place, folder in enumerate(shards):
        mine = own(experiment, folder, **NUMBERED)
        simulated = Node(experiment, place, 2, None)
        assert_same(mine, simulated, "training", "evaluated")
        assert len(mine.training) > 5
        for client in [*simulated.training.tolist(), *simulated.evaluated.tolist()]:
            one, other = mine.population.client(client), simulated.population.client(client)
            assert one.client == other.client == client
            assert_same(one, other, "items", "labels", "positives", "times")
            for codes, expected in zip(one.features, other.features, strict=True):
                np.testing.assert_array_equal(codes, expected)
        of_both, clients = (mine.population, simulated.population), simulated.training
        held = [population.held_out(simulated.evaluated, "test") for population in of_both]
        assert_same(*held, "seen", "known", "relevant")
        rows = [population.rows(clients, "all") for population in of_both]
        assert_same(*rows, "ids", "items", "labels")
        for given in ({"rated": True}, {"low_rated": 0.3}):
            np.testing.assert_array_equal(*(p.histories(clients, **given) for p in of_both))
        for name, value in simulated.initial().items():
            assert torch.equal(mine.initial()[name], value)


FOLD_IN = (
    "rounds=2",
    "model={name='fold-in', items=12, factors=4}",
    "step={name='gram', low-rated=0.3}",
    "strategy={name='popularity-start', step={name='counts', low-rated=0.3},"
    " main={name='fold-in'}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=0}",
)


def test_vectors_of_items_reach_devices_in_the_catalogue(load_tiny, tmp_path):
    """Their files are the operator's."""
    items = Population.of(load_tiny()).interactions.num_items
    np.save(tmp_path / "cover.npy", np.random.default_rng(0).normal(size=(items, 3)))
    (tmp_path / "cover.txt").write_text("\n".join(str(item) for item in range(1, items + 1)))
    experiment = load_tiny(*FOLD_IN, f"dataset.item-vectors=['{tmp_path / 'cover.npy'}']")
    cut(experiment, [tmp_path])
    expected = public_coordinates(experiment)
    (tmp_path / "cover.npy").unlink()
    assert torch.equal(own(experiment, tmp_path).initial()["item.public"], expected)
    assert expected.shape[1] > public_coordinates(load_tiny(*FOLD_IN)).shape[1]


def public_coordinates(experiment):
    return Node(experiment, 0, 1, None).initial()["item.public"]


def test_a_device_fits_tastes_and_sends_statistics_as_a_simulated_node(load_tiny, shards):
    """Counts and products in training, and a taste from the device's own rows in evaluation."""
    experiment = load_tiny(*FOLD_IN)
    simulated = Node(experiment, 0, 2, None)
    nodes = own(experiment, shards[0], **NUMBERED), simulated
    arrays = {name: value.numpy() for name, value in simulated.initial().items()}
    for number, name in enumerate(("counts", "gram"), start=1):
        order = TrainOrder(number, simulated.training, step={"name": name, "low-rated": 0.3})
        assert assert_same_sums(nodes, arrays, order) > 10
    order = EvaluateOrder(2, simulated.evaluated)
    one, other = (evaluate_clients(node, arrays, order).table for node in nodes)
    metrics = list(one.columns)  # devices tell no groups
    assert "hits@5" in metrics
    np.testing.assert_array_equal(one.to_numpy(), other[metrics].to_numpy())


def assert_same_sums(nodes, arrays, order):
    """Two nodes reply alike; returns by how much the parameters moved."""
    one, other = (train_clients(node, arrays, order) for node in nodes)
    moved = 0.0
    for name in arrays:
        mine, theirs = (dense_change(sums.total[name]) for sums in (one, other))
        np.testing.assert_array_equal(mine, theirs)
        moved += float(np.abs(mine).sum())
    assert (one.examples, one.loss) == (other.examples, other.loss)
    return moved


def test_the_catalogue_contains_nothing_of_users(load_tiny, shards):
    population = Population.of(load_tiny())
    found = Catalogue.read(shards[0] / "catalogue.json")
    assert found.item_ids.tolist() == population.interactions.item_ids.astype(str).tolist()
    assert found.item_features.names == population.interactions.item_features.names
    for feature in population.interactions.user_features.features:
        assert (feature.name, feature.categories) in found.user_features
    (shards[0] / "catalogue.json").write_text('{"items": 3}')
    with pytest.raises(DataError, match="not a catalogue"):
        Catalogue.read(shards[0] / "catalogue.json")


def test_categories_that_the_catalogue_lacks_are_told(shards, caplog):
    data = shards[0] / "data.csv"
    frame = pd.read_csv(data, dtype=str)
    (name, categories), *_ = Catalogue.read(shards[0] / "catalogue.json").user_features
    first = frame["user"].iloc[0]
    frame.loc[frame["user"] == first, name] = f"nowhere|{categories[-1]}"
    frame.to_csv(data, index=False)
    interactions, names, _ = read_own(data, shards[0] / "catalogue.json")
    row = interactions.user_features[name].padded()[names.index(first)]
    assert [code for code in row.tolist() if code >= 0] == [len(categories) - 1]
    assert f"ignored 1 values of feature {name!r} that are not categories" in caplog.text
    assert "'nowhere'" in caplog.text


def test_users_go_by_random_numbers_that_survive_a_restart(load_tiny, shards):
    items = Catalogue.read(shards[0] / "catalogue.json").item_ids[:6].tolist()
    data = write(
        shards[0],
        *[f"{user},{item},5,{t}" for user in ("ann", "bob") for t, item in enumerate(items)],
    )
    experiment = load(_with_split(load_tiny))
    first, again = (own(experiment, shards[0], data) for _ in range(2))
    assert len(first.training) == 2 and np.array_equal(first.training, again.training)
    assert (np.diff(first.training) > 0).all()
    other = own(experiment, shards[1], data)
    assert not np.isin(first.training, other.training).any()
    memory = shards[0] / "state" / "node.sqlite"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    assert first.population.client(int(first.training[0])).client == first.training[0]
    assert (first.training >= 0).all() and first.training.max() > 2**40


def _with_split(load_tiny):
    table = load_tiny().table()
    return {**table, "split": {"name": "leave-one-out", "order": "temporal"}}


def test_items_outside_the_catalogue_are_left_out_and_none_inside_is_an_error(load_tiny, shards):
    item = Catalogue.read(shards[0] / "catalogue.json").item_ids[3]
    data = write(shards[0], f"ann,{item},5,2,train", "ann,x,5,1,train", header=PARTS)
    node = own(load_tiny(), shards[0], data)
    (client,) = node.training.tolist()
    assert node.population.client(client).items.tolist() == [3]
    with pytest.raises(DataError, match="is in the catalogue"):
        node = own(load_tiny(), shards[0], write(shards[0], "ann,x,5,1,train", header=PARTS))
        node.training  # noqa: B018


PARTS = "user,item,rating,time,part"


def test_a_part_that_is_none_is_refused(load_tiny, shards):
    item = Catalogue.read(shards[0] / "catalogue.json").item_ids[3]
    with pytest.raises(DataError, match="unknown value in column part"):
        file = write(shards[0], f"ann,{item},5,2,trian", header=PARTS)
        own(load_tiny(), shards[0], file).training  # noqa: B018


def test_the_dataset_that_the_server_names_is_never_read(load_tiny, shards):
    elsewhere = load_tiny("dataset.name=table", "dataset.path=/etc/passwd")
    assert (
        own(elsewhere, shards[0], **NUMBERED).training.tolist()
        == own(load_tiny(), shards[0], **NUMBERED).training.tolist()
    )


def test_only_its_own_users_and_only_as_often_as_allowed(load_tiny, shards):
    with pytest.raises(ExperimentError, match=r"unknown key 'node\.most-round'"):
        own(load_tiny(), shards[0], most_round=2, **NUMBERED)
    node = own(load_tiny(), shards[0], most_rounds=2, **NUMBERED)
    mine, foreign = node.training[:2], np.array([1, 10**6])
    order = TrainOrder(1, np.concatenate([mine, foreign]))
    assert node.accept(order).clients.tolist() == mine.tolist()
    assert (
        node.accept(replace(order, round=2, clients=mine[:1])).clients.tolist() == mine[:1].tolist()
    )
    again = own(load_tiny(), shards[0], most_rounds=2, **NUMBERED)  # after a restart
    assert again.accept(replace(order, round=3)).clients.tolist() == mine[1:].tolist()
    assert [rounds for rounds, _ in again.memory.spent().values()] == [2, 2]


def test_the_limits_of_a_shard_end_after_ten_runs_of_the_experiment(load_tiny, shards, caplog):
    """By the settings that the operator's shard has, without any of its owner."""
    experiment = load_tiny("rounds=2")
    cut(experiment, [shards[0]])
    table = tomllib.loads((shards[0] / "node.toml").read_text())
    node = own(experiment, shards[0], **table)
    assert (node.policy.most_rounds, node.policy.most_evaluations) == (20, 40)
    took = []
    for run in range(12):
        node.run = f"{run:016x}"
        took += [len(node.accept(TrainOrder(n, node.training[:3])).clients) for n in (1, 2)]
    assert took == [3] * 20 + [0] * 4
    assert "round 2: 3 clients reached the limit of rounds or of epsilon" in caplog.text


def test_own_noise_is_accounted_and_comes_from_the_system(load_tiny, shards):
    node = own(load_tiny(), shards[0], **NUMBERED)
    assert isinstance(node.noise, Secure)
    local = Protection(2.0, 2, ("w",), noise_scale=4.0)
    for number in (1, 2):
        node.accept(TrainOrder(number, node.training[:1], protection=local))
    ((rounds, rho),) = node.memory.spent().values()
    # rho = (sensitivity / sigma)^2 / 2, of exchanging all rows of the user
    assert rounds == 2 and rho == pytest.approx(2 * 0.5 * (2 * 2.0 / 4.0) ** 2)


def arrived(answer):
    """The server's view of a reply after serialization."""
    return from_the_network(answer.content)


def context_of(experiment, folder):
    """The context of a node, as Flower makes it."""
    run = {"resolved": experiment.model_dump_json(), "run": "00ff" * 4}
    settings = {name: str(file) for name, file in files_of(folder).items()}
    return Context(1, 2, {**settings, **NUMBERED}, RecordDict(), run)


def test_answers_name_no_groups_and_only_hosted_clients(load_tiny, shards, identity):
    experiment = load_tiny()
    context = context_of(experiment, shards[0])
    theta = read_arrays(arrived(app(Message(RecordDict(), 2, INITIAL), context)))
    node = node_of(context)
    assert isinstance(node, DeviceNode)
    assert node.private.file == shards[0] / "state" / "private" / "00ff00ff00ff00ff.sqlite"
    everybody = Population.of(experiment).evaluated_clients("test")
    order = EvaluateOrder(1, everybody)
    asked = Message(pack_order(order, to_record(theta)), 2, "evaluate")
    table = Evaluated(*unpack_table(arrived(app(asked, context)))).table
    assert table.index.tolist() == node.evaluated.tolist() and len(table) < len(everybody)
    assert not [column for column in table if column.startswith(GROUP)]
    order = TrainOrder(1, np.arange(24))
    answer = app(Message(pack_order(order, to_record(theta)), 2, "train"), context).content
    assert all(
        type(a).__name__ == "Array"
        for record in answer.array_records.values()
        for a in record.values()
    )
    assert unpack_sum(from_the_network(answer)).clients == len(node.training)


@pytest.mark.parametrize(
    "system",
    [("engine.path=reference",), systems.SASREC, systems.GRU4REC, systems.TRANSITIONS],
    ids=["mf", "sasrec", "gru4rec", "transitions"],
)
def test_the_sum_of_own_nodes_is_that_of_simulated_nodes(load_tiny, shards, system):
    """Also of systems with order, whose nodes read the times of their own data."""
    experiment = load_tiny(*system)
    cut(experiment, shards)
    for place, folder in enumerate(shards):
        simulated = Node(experiment, place, 2, None)
        nodes = own(experiment, folder, **NUMBERED), simulated
        theta = {name: value.numpy() for name, value in simulated.initial().items()}
        assert assert_same_sums(nodes, theta, TrainOrder(1, simulated.training)) > 0


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_no_server_learns_which_items_a_client_has(load_tiny, shards, identity, purpose):
    order = ItemQuery(1, np.array([0, 2]), purpose, {"name": "sgd"})
    with pytest.raises(RefusalError, match="not available on real clients"):
        app(Message(pack_order(order), 2, ITEMS), context_of(load_tiny(), shards[0]))


def test_memory_survives_and_keeps_runs_apart(tmp_path):
    file = tmp_path / "a" / "node.sqlite"
    numbers = Participation(file).numbers(["ann", "bob"])
    assert Participation(file).numbers(["bob", "ann", "eve"])[:2].tolist() == numbers[::-1].tolist()
    memory = Participation(file)
    for run in ("one", "two"):
        memory.spend(run, 1, numbers[:1], 0.25, Limits())
    assert Participation(file).spent() == {int(numbers[0]): (2, 0.5)}
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT COUNT(*) FROM spent").fetchone() == (2,)


@pytest.mark.slow
def test_malicious_clients_are_refused_before_their_code_is_loaded(load_tiny, shards):
    """Where an adversary is, no module of attacks is imported on a node; without one, neither."""
    experiment = load_tiny("adversary={attack='explicit-boosting'}")
    with pytest.raises(RefusalError, match=r"\[adversary\] is only for simulations"):
        own(experiment, shards[0], **NUMBERED)
    code = """
import json, sys
from clients.device.policy import Policy, experiment_of
from fedrec.errors import RefusalError
import clients.app, clients.device.node
experiment = experiment_of({"resolved": sys.stdin.read()})
try:
    Policy().accepted(experiment)
except RefusalError as error:
    print(error)
print([name for name in sys.modules if name.partition(".")[0] == "simulations"])
"""
    table = json.dumps(experiment.table())
    done = subprocess.run(
        [sys.executable, "-c", code], input=table, capture_output=True, text=True, check=True
    )
    assert "only for simulations" in done.stdout and done.stdout.endswith("[]\n")


def test_an_owner_may_insist_on_secure_aggregation(load_tiny, shards):
    with pytest.raises(RefusalError, match=r"does not send its own sum.*least-nodes = 3"):
        own(load_tiny(), shards[0], least_nodes=3)
    secure = load_tiny("secure-aggregation=true")
    with pytest.raises(RefusalError, match=r"has no signing.key and signing.crt"):
        own(secure, shards[0])
    certify(shards[0])
    assert own(secure, shards[0], least_nodes=3, join=shards[0]).least_nodes == 3
    bare = own(secure, shards[0], join=shards[0]), own(load_tiny(), shards[1])
    assert [node.least_nodes for node in bare] == [0, 0]


@pytest.mark.parametrize("name", ["²", "x", "", "-1", "1.5", str(2**62), "9" * 5000])
def test_a_name_that_is_no_number_is_refused(name):
    node = SimpleNamespace(policy=Policy(numbers=True))
    with pytest.raises(ClientError, match="not a number"):
        DeviceNode._numbers(node, ["7", name])
    assert DeviceNode._numbers(node, ["7", str(2**62 - 1)]).tolist() == [7, 2**62 - 1]
