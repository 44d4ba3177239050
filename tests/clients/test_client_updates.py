# SPDX-License-Identifier: Apache-2.0
"""What nodes send: compressed, in which precision, from which device, and with which imports."""

import json
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import clients.app
from benchmarks.contestants.shipped import initial, trained
from clients.node import Node
from clients.sums import CompressedUpdates
from fedrec.device import resolve_device
from fedrec.errors import EngineError, ExperimentError, FedrecError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import dense_change
from tests.runs import parameters_in
from tests.second_device import DEVICE, SecondDevice
from tests.systems import LAST_OUT, SYSTEMS

LOSSLESS = "compression={name='rounding', bits=32}"
MF = "model={name='mf', factors=4}", "step.private-parameters=['user.*']"


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), MF])
@pytest.mark.parametrize("more", ["strategy.name=reptile", "strategy={name='fedavg'}"])
def test_nothing_changes_when_nothing_is_lost(run_tiny, model, more):
    plain = run_tiny(more, *model, output="plain")
    found = run_tiny(more, LOSSLESS, *model, output="compressed")
    for name, value in plain.parameters.items():
        assert np.allclose(found.parameters[name], value, rtol=1e-4, atol=1e-6), name
    cost = json.loads((found.folder / "result.json").read_text())["cost"]
    assert cost["bytes-up"] == found.rounds["bytes-up"].sum()


def test_bytes_are_those_of_the_rows_that_clients_change(run_tiny, monkeypatch):
    """Two-byte row numbers at most, four bytes a number; parameters that stay are not counted."""
    seen = []
    sent = CompressedUpdates._sent

    def count(self, client, update, arrays, clip):
        size = 0
        for name, change in update.items():
            assert not name.startswith("user")
            if hasattr(change, "rows"):
                size += len(change.rows) * (1 if len(arrays[name]) <= 256 else 2)
                size += 4 * change.values.size
            else:
                size += 4 * change.size
        seen.append(size)
        return sent(self, client, update, arrays, clip)

    monkeypatch.setattr(CompressedUpdates, "_sent", count)
    result = run_tiny(LOSSLESS, *MF, "engine.name=serial")
    assert seen and result.rounds["bytes-up"].sum() == sum(seen)


def test_what_is_left_out_is_found_on_any_number_of_nodes(run_tiny):
    """The work is not balanced between nodes: a client's next update is made where it is kept."""
    top = "compression={name='top-k', share=0.1, bits=32}"
    alone, divided = (
        run_tiny(top, "rounds=3", "engine.name=serial", f"engine.nodes={nodes}", output=str(nodes))
        for nodes in (1, 3)
    )
    assert divided.rounds["bytes-up"].tolist() == alone.rounds["bytes-up"].tolist()
    for name, value in alone.parameters.items():
        assert np.allclose(divided.parameters[name], value, rtol=1e-4, atol=1e-6), name


def test_what_is_left_out_is_sent_later(run_tiny, monkeypatch):
    """Over all rounds of a client, what was sent and what is left are what its updates were."""
    updates: dict = {}
    left: dict = {}
    sent: dict = {}
    one_block = CompressedUpdates.of_block

    def watched(self, clients, trained, arrays, names, tables, shares, clip):
        found = one_block(self, clients, trained, arrays, names, tables, shares, clip)
        for place, client in enumerate(clients):
            change = trained.changes_of(place)["item.factors"].double().numpy()
            updates[client] = updates.get(client, 0) + change
            sent[client] = sent.get(client, 0) + found[place]["item.factors"].dense()
            (kept,) = self.errors[client]["compression/item.factors"]
            left[client] = kept.dense()
            assert kept.values.any(1).all()  # rows without a rest are not kept
        return found

    monkeypatch.setattr(CompressedUpdates, "of_block", watched)
    top = "compression={name='top-k', share=0.2, bits=8}"
    run_tiny(top, *MF, "rounds=6", "engine.name=serial", "sampler.cohort=9")
    assert any(np.abs(value).max() > 0 for value in left.values())
    for client, whole in updates.items():
        assert np.allclose(sent[client] + left[client], whole, atol=1e-5)


def test_what_is_left_out_is_saved_beside_private_parameters(run_tiny, monkeypatch):
    saved: list = []
    monkeypatch.setattr(
        "clients.round._save_private",
        lambda node, private, round_: saved.extend(values for _, values in private),
    )
    run_tiny("compression={name='top-k', share=0.2}", *MF)
    assert saved and all("user.factors" in arrays for arrays in saved)
    assert any(name.startswith("compression/") for arrays in saved for name in arrays)


def test_privacy_costs_the_same_and_the_clip_holds(run_tiny, monkeypatch):
    """Rounding makes some updates longer; none of them is above the clip norm."""
    private = "privacy={clip-norm=0.01, noise-multiplier=1.0, delta=1e-5}"
    norms = []
    one_block = CompressedUpdates.of_block

    def watched(self, *arguments):
        found = one_block(self, *arguments)
        norms.extend(
            np.sqrt(sum(np.square(getattr(c, "values", c)).sum() for c in update.values()))
            for update in found
        )
        return found

    plain = run_tiny(private, output="plain")
    monkeypatch.setattr(CompressedUpdates, "of_block", watched)
    run_tiny(private, "compression={name='rounding', bits=2}", output="compressed")
    assert norms and max(norms) <= 0.01 * (1 + 1e-9) and max(norms) > 0.0099
    ledgers = [
        Ledger(plain.folder.parent / name / "privacy.jsonl") for name in ("plain", "compressed")
    ]
    assert ledgers[0].spent(1e-5).epsilon == ledgers[1].spent(1e-5).epsilon > 0


def test_sums_without_signs_may_have_signs_after_compression(load_tiny, tmp_path):
    """So that they are accounted as updates with signs are: 2S and not sqrt(2) S."""
    from server.privacy.guard import PhasePlans

    counted = (
        "model.item-bias=true",
        "step={name='counts'}",
        "strategy={name='reptile'}",
        "privacy={clip-norm=1.0, noise-multiplier=1.0, delta=1e-5}",
    )
    made = [
        PhasePlans.before_a_run(load_tiny(*counted, *more), np.arange(18)).plans
        for more in ((), ("compression={name='rounding', bits=8}",))
    ]
    (plain,), (compressed,) = (plans.values() for plans in made)
    assert compressed.sensitivity == pytest.approx(plain.sensitivity * 2**0.5)


@pytest.mark.parametrize(
    "override",
    [
        "privacy={clip-norm=1.0, noise-multiplier=1.0, placement='local'}",
        "strategy.name=median",
        "compression.bits=7",
        "compression.name=nothing",
    ],
)
def test_what_has_no_effect_is_refused(run_tiny, override):
    with pytest.raises(FedrecError, match=r"compression|bits"):
        run_tiny("compression={name='rounding', bits=8}", override)


def test_masked_sums_of_compressed_updates_are_refused(run_tiny):
    with pytest.raises(FedrecError, match="cannot be combined"):
        run_tiny(
            "compression={name='top-k'}",
            "secure-aggregation=true",
            "engine={name='serial', nodes=3}",
        )


# Local training with products in bfloat16: close to float32 on both paths, and updates are float32.

SGD = ["step.epochs=3", "step.learning-rate=0.2", "step.batch-size=4", "model.activation=tanh"]
STEPS = {
    "plain": SGD,
    "proximal": [*SGD, "step.proximal-mu=0.3"],
    "late": [*SGD, "step.late-parameters=['item.*']"],
    "vae": ["model={name='vae', hidden=8, latent=3}", "step={name='vae', learning-rate=0.2}"],
}


@pytest.fixture
def sums(load_tiny, first_sums, tmp_path_factory):
    """A node's sums after a round in some precision, as whole arrays; without ReLU, whose sign
    rounding may change."""

    def train(precision, path, *overrides):
        experiment = load_tiny(f"engine.path={path}", *overrides)
        node = Node(experiment, 0, 1, tmp_path_factory.mktemp("node"))
        # The experiment would be refused on a CPU, but the computation is the same.
        engine = experiment.engine.model_copy(update={"precision": precision})
        node.experiment = experiment.model_copy(update={"engine": engine})
        return first_sums(node)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("case", STEPS)
def test_updates_are_near_those_of_float32(sums, case, path):
    """bfloat16 has 8 bits: a relative error of 2e-3 in each product, and somewhat more after
    several steps."""
    exact, reply = sums("float32", path, *STEPS[case])
    rough, rough_reply = sums("bf16", path, *STEPS[case])
    assert {
        change.dtype for change in rough_reply.total.values() if isinstance(change, np.ndarray)
    } == {np.dtype("f4")}
    for name, value in exact.items():
        distance = np.linalg.norm(rough[name] - value) / np.linalg.norm(value)
        assert 0 < distance < 0.05, name
    assert rough_reply.loss == pytest.approx(reply.loss, rel=0.01)


def test_a_step_that_solves_keeps_float32(sums):
    """Products that are rounded need not be positive definite."""
    als = ["model={name='ials', factors=4}", "step={name='als'}", "strategy={name='fcf'}"]
    exact, _ = sums("float32", "auto", *als)
    rough, _ = sums("bf16", "auto", *als)
    assert any(value.any() for value in exact.values())
    for name, value in exact.items():
        np.testing.assert_array_equal(rough[name], value, name)


def test_a_step_that_clips_its_own_uploads_keeps_float32(sums):
    """Rounding after the clip would not be covered by any epsilon."""
    noisy = [
        "model={name='vae', hidden=6, latent=3}",
        "step={name='dpvae', participations=2}",
        "split={name='ratio'}",
    ]
    with pytest.raises(ExperimentError, match="beyond the clip norm"):
        sums("bf16", "auto", *noisy)
    assert sums("float32", "auto", *noisy)


def test_bf16_needs_cuda():
    with pytest.raises(EngineError, match=r"a CUDA device(.*\n)*.*engine.precision = 'float32'"):
        resolve_device("cpu", "bf16")
    assert resolve_device("cpu", "float32").type == "cpu"


# The same numbers on a GPU, and everywhere on a second device without hardware, which also counts
# what the processor and a GPU would wait for each other for.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TRAINING = ("step.epochs=3", "step.learning-rate=0.2", "step.batch-size=8", "model.activation=tanh")
TRAINING_DEVICES_STEPS = {
    "plain": [],
    "proximal": ["step.proximal-mu=0.3"],
    "late": ["step.late-parameters=['item.*']", "step.rates={'item.id' = 3.0}"],
    "biases": ["model.item-bias=true"],
}
PROTECTED = ("privacy={clip-norm=0.5, noise-multiplier=1.0, delta=1e-3}",)
# Adam would make steps of rounding: in exact arithmetic, keys' biases have a gradient of zero
SASREC = (*SYSTEMS["sasrec"], "strategy={name='fedavg'}")
# users end at different steps, and what a GPU would replay must leave them as they are
GPFEDREC = (*SYSTEMS["gpfedrec"], "step.epochs=4")
RUNS = {"privrec": (), "protected": PROTECTED, **SYSTEMS, "sasrec": SASREC, "gpfedrec": GPFEDREC}
QUICK = ("plain", "late")
CASES = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
    for case in TRAINING_DEVICES_STEPS
]


@pytest.fixture(params=["second device", pytest.param("cuda", marks=needs_cuda)])
def elsewhere(request):
    """Returns a context in which nodes compute on another device than the processor, if they are
    made with the overrides that it yields."""

    @contextmanager
    def entered():
        if request.param == "cuda":
            yield ["engine.device=cuda"]
        else:
            place = "clients.node.resolve_device"
            with pytest.MonkeyPatch.context() as patch, SecondDevice():
                patch.setattr(place, lambda *_: DEVICE)
                yield ["engine.path=blocks"]

    return entered


@pytest.fixture
def device_sums(load_tiny):
    """A node's sums after a round of some clients of the tiny experiment with overrides."""

    def found(*overrides):
        node = Node(load_tiny(*TRAINING, *overrides), 0, 1, None)
        arrays = initial(node)
        return trained(node, arrays, TrainOrder(1, node.training[:3], "uniform"))[1]

    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_processor(device_sums, elsewhere, case):
    wanted = device_sums("engine.path=reference", *TRAINING_DEVICES_STEPS[case])
    with elsewhere() as overrides:
        found = device_sums(*overrides, *TRAINING_DEVICES_STEPS[case])
    for name, value in wanted.items():
        bound = 2e-6 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=bound)


@needs_cuda
@pytest.mark.parametrize("case", TRAINING_DEVICES_STEPS)
def test_bf16_is_near(device_sums, case):
    wanted = device_sums("engine.path=reference", *TRAINING_DEVICES_STEPS[case])
    found = device_sums(
        "engine.device=cuda", "engine.precision=bf16", *TRAINING_DEVICES_STEPS[case]
    )
    for name, value in wanted.items():
        assert 0 < np.linalg.norm(found[name] - value) / np.linalg.norm(value) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_whole_runs_are_those_of_the_processor(run_tiny, elsewhere, case):
    wanted = run_tiny(*RUNS[case], output="processor")
    with elsewhere() as overrides:
        found = run_tiny(*RUNS[case], *overrides, output="elsewhere")
    for name, value in parameters_in(wanted.folder).items():
        np.testing.assert_allclose(parameters_in(found.folder)[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_step_of_a_block_waits(device_sums, monkeypatch, case):
    monkeypatch.setattr("clients.node.resolve_device", lambda *_: DEVICE)
    crossings = []
    for epochs in (5, 9):
        with SecondDevice() as device:
            device_sums(
                *TRAINING_DEVICES_STEPS[case], "engine.path=blocks", f"step.epochs={epochs}"
            )
        crossings.append(device.crossings)
    assert crossings[0] == crossings[1] and crossings[0].total() > 0


# What leaves the devices of federated recommenders with private parts, in whole rounds: the shared
# part and nothing else.

ROUNDS = ("rounds=2", "sampler={name='full'}", *LAST_OUT)
TOWER = {"tower0.weight", "tower0.bias", "output.weight", "output.bias"}
LAYERS = {
    f"{name}.{part}" for name in ("items", "users") for part in ("weight", "source", "target")
}
# what moves on the server, what a device keeps
SUMMED = {
    "mf": ({"item.factors", "item.bias", "bias"}, {"user.factors", "user.bias"}),
    "fedncf": ({"item.factors", "item.tower", *TOWER}, {"user.factors", "user.tower"}),
    "pfedrec": ({"item.id"}, {"score.weight", "score.bias"}),
    "fedrap": ({"item.id"}, {"item.personal", "score.weight", "score.bias"}),
}
SINGLE = {
    "gpfedrec": (
        {"item.id"},
        {"item.own", "user.id"} | {f"layer{n}.{p}" for n in (0, 1) for p in ("weight", "bias")},
    ),
    # tokens and user embedding are for the third party, whose messages the server forwards
    "fedgnn": ({"item.id", *LAYERS, "third.tokens", "third.user"}, {"user.id", "user.vector"}),
}


@pytest.fixture
def replies(monkeypatch):
    """What the app packed into replies to training orders."""
    found = []
    for name in ("pack_sum", "pack_each"):
        packs = getattr(clients.app, name)
        monkeypatch.setattr(
            clients.app, name, lambda reply, packs=packs: found.append(reply) or packs(reply)
        )
    return found


def kept_by_devices(result, private):
    """Checks that devices keep the private parameters, and that these were trained."""
    node = Node(result.experiment, 0, 1, result.folder / "private")
    start = node.initial()
    assert node.private is not None
    kept = node.private.load(int(node.training[0]), result.experiment.rounds + 1)
    assert set(kept) == private
    assert any(not np.array_equal(value, start[name].numpy()) for name, value in kept.items())
    shared = {name: value for name, value in result.parameters.items() if name in private}
    for name, value in shared.items():
        np.testing.assert_array_equal(value, start[name].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("system", SUMMED)
def test_sums_have_no_private_part(run_tiny, replies, system):
    sent, private = SUMMED[system]
    result = run_tiny(*SYSTEMS[system], *ROUNDS)
    assert len(replies) >= 2
    for reply in replies:
        changes = {n: dense_change(c) for n, c in reply.total.items()}
        assert {name for name, change in changes.items() if change.any()} == sent
    kept_by_devices(result, private)


@pytest.mark.parametrize("system", SINGLE)
def test_single_messages_have_no_private_part(run_tiny, replies, system):
    sent, private = SINGLE[system]
    result = run_tiny(*SYSTEMS[system], *ROUNDS)
    assert len(replies) >= 2
    for reply in replies:
        assert {*reply.updates.values, *reply.updates.rows} == sent
    kept_by_devices(result, private)


# What the process of a node imports: each library takes its memory in every one of them.

NODE = """
import sys
from flwr.app import Context, Message, RecordDict
from clients.app import app
from fedrec.protocol.messages import HELLO, INITIAL, pack_order, unpack_presence
from fedrec.protocol.messages import EvaluateOrder, TrainOrder
from simulations.engines.grid import identify_server
identify_server()
run_config = {"resolved": sys.argv[1], "output": ""}
context = Context(1, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), run_config)
ask = lambda kind, content: app(Message(content, 2, kind), context).content
arrays = next(iter(ask(INITIAL, RecordDict()).array_records.values()))
presence = unpack_presence(ask(HELLO, RecordDict()))
assert ask("train", pack_order(TrainOrder(1, presence.training), arrays)).array_records
assert ask("evaluate", pack_order(EvaluateOrder(1, presence.evaluated), arrays)).array_records
of_the_server = {"autodp", "dp_accounting", "scipy.optimize", "scipy.special"}
print(sorted(of_the_server & set(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_a_node_trains_and_evaluates_without_libraries_of_the_server(tiny_experiment, task):
    table = {**tiny_experiment(), "task": task}
    if task == "rating":
        del table["positive-above"]
    resolved = load(table).model_dump_json()
    found = subprocess.check_output([sys.executable, "-c", NODE, resolved], text=True)
    assert found.strip() == "[]"
