# SPDX-License-Identifier: Apache-2.0
"""Attacks of a server on a node: orders and experiments that its owner did not accept, sent as real
messages."""

import json
import math
import sys
import time
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from clients.app import app
from clients.device import node as reply_times
from fedrec.components import registry
from fedrec.components.sections import Section, override
from fedrec.config import Config
from fedrec.errors import ClientError, ExperimentError, RefusalError
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import Experiment
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import (
    CONFIG,
    INITIAL,
    METRICS,
    EvaluateOrder,
    TrainOrder,
    pack_order,
    read_arrays,
    unpack_presence,
    unpack_sum,
    unpack_table,
)
from fedrec.protocol.serialization import from_the_network, to_record
from simulations.deployment.shards import cut
from tests.clients.device.test_device_node import files_of

pytestmark = pytest.mark.usefixtures("identity")
RUN = "0123456789abcdef"
ONE_UPLOAD = (
    "model.name=vae",
    "step={name='dpvae', participations=1, noise='secure'}",
    "sampler.name=limited",
)
SECRET = "root:hunter2:0:0"


class Victim:
    """A real node, and a server that may send it anything."""

    def __init__(self, folder, experiment, **settings):
        self.folder = folder
        cut(experiment, [folder])
        files = {key: str(file) for key, file in files_of(folder).items()}
        self.config = {**files, "numbers": True, **settings}
        self.settings = experiment.table()

    def context(self, changes=None, **run):
        given = {
            "resolved": json.dumps({**self.settings, **(changes or {})}),
            "run": RUN,
            "deployment": True,
        }
        return Context(1, 2, self.config, RecordDict(), {**given, **run})

    def ask(self, kind, content=None, **context):
        answer = app(Message(content or RecordDict(), 2, kind), self.context(**context))
        from_the_network(answer.content)
        return answer.content

    def theta(self, **context):
        return {n: np.array(v) for n, v in read_arrays(self.ask(INITIAL, **context)).items()}

    def order(self, number=1, step=None, **changes):
        section = Experiment.parse(self.settings).step
        own = {"name": section.name, **section.options}
        return TrainOrder(number, np.arange(24), "uniform", {**own, **(step or {})}, **changes)

    def train(self, order, extra=None, **context):
        content = pack_order(order, to_record(self.theta(**context)))
        content[CONFIG].update(extra or {})
        return unpack_sum(self.ask("train", content, **context))

    def evaluate(self, number=1, step=None, clients=None, **context):
        ids = np.arange(24) if clients is None else clients
        content = pack_order(EvaluateOrder(number, ids, step), to_record(self.theta(**context)))
        return Evaluated(*unpack_table(self.ask("evaluate", content, **context))).table


@pytest.fixture
def victim(load_tiny, tmp_path, monkeypatch):
    """Makes a node of the tiny experiment, with overrides and the owner's settings; replies do not
    wait."""
    no_waiting = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(reply_times, "time", no_waiting)

    def make(*overrides, **settings):
        folder = tmp_path / f"node-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Victim(folder, load_tiny(*overrides), **settings)

    return make


@pytest.fixture
def secret(tmp_path):
    """A private file of the node."""
    file = tmp_path / "secret"
    file.mkdir()
    (file / "u1.test").write_text(f"{SECRET}\n")
    (file / "words").write_text(f"male {SECRET}\nfemale {SECRET}\n")
    return file


def refused(attack, match="."):
    """The text of a refusal that the server receives."""
    with pytest.raises(RefusalError, match=match) as found:
        attack()
    text = str(found.value)
    assert SECRET not in text and "hunter2" not in text
    return text


DPVAE = ("model.name=vae", "step.name=dpvae", "step.noise=secure")
VAE = "model={name='vae', hidden=8}; "
PRIORS = VAE + "step={name='dpvae', noise='secure', priors={source='%s', noise=false}}"
STAGES = "strategy={name='two-stage', stage-one={rounds=1, step=%s}}"
NAMES_FILE = "names a file"
TOO_MUCH = "is above this node's limit"
SIMULATED = "is only for simulations"
EXPERIMENTS = {
    "devices={}": SIMULATED,
    "compression={name='rounding'}": SIMULATED,
    "perturb={name='targeted', attribute='gender', epsilon=1.0}": SIMULATED,
    "adversary={attack={name='explicit-boosting'}}": SIMULATED,
    PRIORS % "glove:SECRET/words": NAMES_FILE,
    PRIORS % "table:SECRET/words": NAMES_FILE,
    PRIORS % "glove:SECRET/absent": NAMES_FILE,
    PRIORS % "glove:words": NAMES_FILE,
    "split={name='kfold', folder='SECRET'}": NAMES_FILE,
    "split={name='kfold', folder='/nowhere'}": NAMES_FILE,
    "split={name='kfold', folder='../..'}": NAMES_FILE,
    STAGES % "{name='dpvae', priors={source='glove:SECRET/words'}}": NAMES_FILE,
    VAE + "step={name='dpvae', noise='reproducible'}": r"step\.noise",
    VAE + "step={name='dpvae', noise='summed'}": r"step\.noise",
    "step.epochs=1000000000": TOO_MUCH,
    "step.negatives=100000000": TOO_MUCH,
    "evaluation.fine-tune.epochs=1000000000": TOO_MUCH,
    "engine.threads=100000": TOO_MUCH,
}


@pytest.mark.parametrize("changes", EXPERIMENTS)
def test_experiments_that_are_refused(victim, secret, changes):
    """They have sections of simulations, read files of the node, have noise that the server knows,
    or are too much work."""
    node = victim()
    for text in changes.replace("SECRET", str(secret)).split("; "):
        node.settings = override(node.settings, text)
    refused(node.theta, EXPERIMENTS[changes])


def test_the_experiment_comes_whole_and_not_as_a_file_to_be_read(victim, secret):
    node = victim()
    for name in (str(secret / "words"), "/nowhere", "privrec-synthetic"):
        refused(lambda n=name: node.ask(INITIAL, resolved="", experiment=n), "no experiment")


def test_an_error_reveals_nothing_of_the_nodes_files(victim):
    node = victim()
    (node.folder / "data.csv").write_text(f"user,item,rating,time,part\nann,1,5,2,{SECRET}\n")
    texts = []
    for attempt in range(3):
        if attempt == 1:
            (node.folder / "data.csv").unlink()
        if attempt == 2:
            (node.folder / "catalogue.json").write_text(SECRET)
        with pytest.raises(ClientError) as found:
            node.ask("query.hello")
        texts.append(str(found.value))
        assert found.value.__cause__ is None and found.value.__suppress_context__
    assert len(set(texts)) == 1
    assert "log" in texts[0]
    assert SECRET not in texts[0]
    assert str(node.folder) not in texts[0]


def test_without_its_own_data_a_node_reads_no_other_data(victim, secret):
    node = victim()
    del node.config["data"]
    dataset = {"name": "table", "path": str(secret / "words")}
    refused(lambda: node.theta(changes={"dataset": dataset}), "no data")


LOCAL = 'privacy={clip-norm=0.5, noise-multiplier=1.0, placement="local"}'


def local(scale=1.0, clip=0.5, names=None, **changes):
    return Protection(clip, 2, tuple(names or ()), noise_scale=scale, **changes)


def test_an_order_without_protection_gives_no_bare_update(victim):
    node = victim(LOCAL, "sampler.name=full")
    names = list(node.theta())
    assert node.train(node.order(protection=local(names=names))).clients > 0
    refused(lambda: node.train(node.order()), "got: protection:")
    standard = TrainOrder(1, None, "examples", None)
    content = pack_order(standard, to_record(node.theta()))
    refused(lambda: node.ask("train", content), "got: protection:")


def test_noise_is_not_averaged_out_by_asking_again_and_again(victim):
    """Noise is fresh each time: the mean of a hundred replies to one order would have a tenth of
    it."""
    node = victim(LOCAL, "sampler.name=full", "rounds=3")
    order = node.order(protection=local(names=node.theta()))
    twice = TrainOrder(
        1, np.repeat(order.clients, 50), "uniform", order.step, protection=order.protection
    )
    assert node.train(twice).clients == 18
    assert [node.train(order).clients for _ in range(4)] == [18, 18, 0, 0]
    assert (
        node.train(
            TrainOrder(3, order.clients, step=order.step, protection=order.protection)
        ).clients
        == 0
    )
    own = victim(*DPVAE)  # of two rounds
    assert [own.train(own.order()).clients for _ in range(4)] == [18, 18, 0, 0]
    bare = victim()
    # a round may be run again
    assert [bare.train(bare.order()).clients for _ in range(4)] == [18] * 4


def weaker(node, **changes):
    """Order with other protection than the experiment's."""
    names = tuple(node.theta())
    full = {"order": 2, "names": names, "clip_norm": 0.5, "noise_scale": 1.0}
    return node.order(protection=Protection(**{**full, **changes}))


IN_ALL_ROUNDS = 'privacy={clip-norm=1.0, epsilon=3.0, delta=1e-5, placement="local"}', "rounds=3"
COUNTS = LOCAL, "step.name=counts", "model.item-bias=true"
PROTECTIONS = [
    *[((LOCAL,), {"noise_scale": scale}, False) for scale in (0.99, 0.0, -1.0, math.nan, math.inf)],
    *[((LOCAL,), change, False) for change in ({"order": 1}, {"mechanism": "laplace"})],
    *[((LOCAL,), {"clip_norm": 5.0, "noise_scale": scale}, False) for scale in (1.0, 10.0)],
    # counts are non-negative, so replacing a user moves them by sqrt(2) S
    *[(COUNTS, {"noise_scale": scale}, enough) for scale, enough in ((0.7, False), (0.7072, True))],
    # three rounds at epsilon 3 need 1.7 times the noise of one
    (IN_ALL_ROUNDS, {"clip_norm": 1.0, "noise_scale": 2.5}, False),
    (IN_ALL_ROUNDS, {"clip_norm": 1.0, "noise_scale": 5.0}, True),
]
STEPS = {"epochs": 1000}, {"learning-rate": 1e9}, {"private-parameters": []}


@pytest.mark.parametrize(("overrides", "changes", "enough"), PROTECTIONS)
def test_an_order_with_less_protection_than_the_experiment_is_refused(
    victim, overrides, changes, enough
):
    node = victim(*overrides, "sampler.name=full")
    if enough:
        assert node.train(weaker(node, **changes)).clients > 0
    else:
        refused(lambda: node.train(weaker(node, **changes)), "got: protection:")


@pytest.mark.parametrize("changes", [*STEPS, {"priors": {"source": "glove:words"}}])
def test_an_order_changes_no_setting_of_the_step(victim, changes):
    node = victim(*(DPVAE if "priors" in changes else ['step.private-parameters=["user.*"]']))
    order = node.order(step=changes)
    refused(lambda: node.train(order), "got: step:")
    refused(lambda: node.evaluate(1, order.step), "got: step:")


@pytest.mark.parametrize("number", [0, -1, 3, 10**9])
def test_rounds_are_those_of_the_experiment(victim, number):
    node = victim()  # of two rounds
    refused(lambda: node.train(node.order(number)), "got: round:")


WRONG = "of another type or size"
SETTINGS = [
    ("overrides", "x", "'overrides'"),
    ("proximal-mu", -1e9, "got: proximal-mu:"),
    *[("server-round", value, WRONG) for value in ("1", 2**40, True)],
    *[("clients", value, WRONG) for value in ([1.5], "1")],
    ("step", "x" * (2**20 + 1), WRONG),
    ("protection", b"{}", WRONG),
    ("weighting", "u" * 101, WRONG),
    ("each", 1, WRONG),
    *[("proximal-mu", value, WRONG) for value in ("1", float("nan"))],
]


@pytest.mark.parametrize(("key", "value", "words"), SETTINGS)
def test_settings_of_orders_have_names_types_and_limits(victim, key, value, words):
    node = victim()
    text = refused(lambda: node.train(node.order(), {key: value}), words)
    assert key in text and len(text) < 1000
    path = RecordDict({"config": ConfigRecord({"path": "/etc/passwd"})})
    refused(lambda: node.ask("query.hello", path), "'path'")


def test_one_run_has_one_experiment(victim):
    node = victim(*ONE_UPLOAD)
    assert node.train(node.order(1)).clients > 0
    changes = {"step": {**node.settings["step"], "participations": 50}}
    refused(lambda: node.theta(changes=changes), "another experiment")
    assert node.theta(changes=changes, run="f" * 16)


@pytest.mark.parametrize(
    ("overrides", "least", "accepted"),
    [
        ((), 1.0, False),
        (("privacy={clip-norm=0.5, noise-multiplier=1.0}",), 1.0, False),
        ((LOCAL, "sampler.name=full"), 2.0, True),
        ((LOCAL, "sampler.name=full"), 2.1, False),
        # of the step itself: sqrt(2 ln(1.25 / 1e-5)) = 4.8
        ((*DPVAE, "step.budgets=equal", "step.epsilon=1.0"), 4.0, True),
        ((*DPVAE, "step.budgets=equal", "step.epsilon=1.0"), 5.0, False),
    ],
)
def test_an_owner_may_insist_on_noise(victim, overrides, least, accepted):
    node = victim(*overrides, **{"least-noise": least})

    def attack():
        names = list(node.theta())
        return node.train(node.order(protection=local(names=names) if LOCAL in overrides else None))

    if accepted:
        assert attack().clients > 0
    else:
        refused(attack, "least-noise")


@pytest.mark.parametrize(
    "run", ["../../../x", "", "x" * 16, RUN[1:], RUN.upper(), RUN + "0", RUN + "\n"]
)
def test_a_run_key_is_no_path(victim, run, tmp_path):
    node = victim()
    refused(lambda: node.theta(run=run), "run key")
    assert not list(tmp_path.rglob("x.sqlite"))


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """An installed package with a step named `foreign`, which records that it is imported."""
    package = tmp_path / "packages" / "foreign_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "step.py").write_text(
        "from pathlib import Path\nfrom clients.steps.sgd import Sgd\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\nclass Foreign(Sgd):\n    pass\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    found = registry.entry_points
    entry = EntryPoint("foreign", "foreign_package.step:Foreign", "fedrec.step")
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [entry] if group == "fedrec.step" else found(group=group),
    )
    yield tmp_path / "imported"
    for name in [name for name in sys.modules if name.startswith("foreign_package")]:
        del sys.modules[name]


SECTIONS = {
    "step": {"step": {"name": "{}", "epochs": 1}},
    "fine-tune": {"evaluation": {"fine-tune": {"name": "{}"}}},
    "stage": {
        "strategy": {"name": "two-stage", "stage-one": {"rounds": 1, "step": {"name": "{}"}}}
    },
}


@pytest.mark.parametrize("name", ["foreign", "foreign_package.step:Foreign"])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_package_that_the_owner_did_not_name_is_not_even_imported(victim, plug_in, section, name):
    node = victim()
    changes = json.loads(json.dumps(SECTIONS[section]).replace("{}", name))
    refused(lambda: node.theta(changes=changes), "does not run")
    assert not plug_in.exists()
    node = victim(plugins="foreign_package")
    assert node.theta(changes=changes)
    assert plug_in.exists()


ATTACKS = "simulations.attacks"
WRAPPED = {
    "step": ("systems:Canary", {"canaries": {"first": 24, "count": 8, "magnitude": 3.0}}),
    "model": ("systems:Reserved", {"rows": 8}),
    "split": ("systems:TrainingClients", {"canaries": 8}),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_components_of_attacks_are_refused(victim, plug_in, kind):
    """They name the components within them by other keys than all others do: they could read files,
    import packages, and lift the rules about noise."""
    name, settings = WRAPPED[kind]
    base = "foreign_package.step:Foreign"
    own = {"base": base if kind == "step" else {"name": base}, **settings}
    changes = {kind: {"name": f"{ATTACKS}.{name}", **own}}
    node = victim()
    refused(lambda: node.theta(changes=changes), "does not run")
    assert not plug_in.exists()


@pytest.mark.parametrize("kind", [registry.MODEL, registry.SPLIT, registry.STEP, registry.STRATEGY])
def test_components_within_settings_are_known_as_such(kind):
    """Else the policy could not look into them: a section within settings names its kind, and no
    setting takes just anything."""
    for name in registry.builtin_names(kind):
        component = registry.resolve(kind, name)
        assert component.Config.model_config["extra"] == "forbid", name
        for field, within in settings_below(component.Config):
            section = "Section" in str(within.annotation)
            assert not section or any(isinstance(k, registry.Kind) for k in within.metadata)
            assert "Any" not in str(within.annotation), (name, field)


def settings_below(config):
    """Every field of settings and of the tables within them."""
    for field, within in config.model_fields.items():
        yield field, within
        for inner in (within.annotation, *get_args(within.annotation)):
            if isinstance(inner, type) and issubclass(inner, Config) and inner is not Section:
                yield from settings_below(inner)


def test_a_strategy_of_the_servers_is_not_imported(victim, plug_in):
    node = victim()
    assert node.theta(changes={"strategy": {"name": "foreign_package.step:Foreign", "x": 1}})
    assert not plug_in.exists()


@pytest.mark.parametrize(("owner", "most"), [({"most-evaluations": 3}, 3), ({}, 10)])
def test_evaluations_of_a_client_are_counted_over_all_runs(victim, owner, most):
    node = victim(**owner)
    presence = unpack_presence(node.ask("query.hello"))
    assert presence.work is None and not presence.paths and presence.validated is None
    one = presence.evaluated[:1]
    for probe in range(most):
        assert len(node.evaluate(probe % 3, clients=one, run=f"{probe:016x}")) == 1
    assert len(node.evaluate(1, clients=one, run="f" * 16)) == 0
    assert len(node.evaluate(1)) == 5  # the others
    for _ in range(most):
        standard = pack_order(EvaluateOrder(1, None), to_record(node.theta()))
        content = node.ask("evaluate", standard)
    assert content[METRICS]["num-examples"] == 0


def test_a_phase_is_not_asked_for_in_the_rounds_of_another(victim):
    stage = '{rounds=1, step={name="sgd", epochs=1, learning-rate=0.7}}'
    node = victim(
        "strategy.name=two-stage",
        f"strategy.stage-one={stage}",
        'privacy={clip-norm=0.5, noise-multiplier=1.0, placement="local"}',
        "sampler.name=full",
    )
    first = node.settings["strategy"]["stage-one"]["step"]
    names = tuple(node.theta())
    noisy = local(names=names)
    assert node.train(TrainOrder(1, np.arange(24), step=first, protection=noisy)).clients > 0
    assert node.train(node.order(2, protection=noisy)).clients > 0
    again = TrainOrder(2, np.arange(24), step=first, protection=noisy)
    refused(lambda: node.train(again), "got: step:")
    refused(lambda: node.train(node.order(2)), "got: protection:")
    refused(lambda: node.train(node.order(1)), "got: step:")


@pytest.mark.parametrize("step", ["sgd", "dpsgd"])
@pytest.mark.parametrize(
    ("private", "words"),
    [("*", "leaves none to share"), ("usr.*", r"'usr\.\*'.*private-parameters")],
)
def test_private_parameters_that_leave_nothing_or_match_nothing_are_refused(
    load_tiny, tmp_path, step, private, words
):
    from clients.node import Node

    experiment = load_tiny(f"step.name={step}", f"step.private-parameters=['{private}']")
    with pytest.raises(ExperimentError, match=words):
        Node(experiment, 0, 1, tmp_path).initial()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_parameters_that_are_not_finite_are_refused_before_anyone_takes_part(victim, value):
    """Otherwise a client that uses the row answers differently from one that does not."""
    node = victim(LOCAL, "sampler.name=full")
    theta = node.theta()
    order = node.order(protection=local(names=theta))
    theta[next(iter(theta))][1] = value
    content = pack_order(order, to_record(theta))
    refused(lambda: node.ask("train", content), "invalid parameters in an order")
    content = pack_order(EvaluateOrder(1, np.arange(24), None), to_record(theta))
    refused(lambda: node.ask("evaluate", content), "invalid parameters in an order")
    assert node.train(order).clients == 18


@pytest.mark.slow
def test_a_client_uploads_no_more_often_over_all_runs_than_the_experiment_has_rounds(victim):
    """Each run would draw fresh noise for the same client."""
    node = victim(LOCAL, "sampler.name=full", "rounds=2")
    order = node.order(protection=local(names=node.theta()))
    assert [node.train(order, run=f"{run:016x}").clients for run in range(4)] == [18, 18, 0, 0]
    own = victim(*DPVAE)  # of two rounds
    assert [own.train(own.order(), run=f"{run:016x}").clients for run in range(3)] == [18, 18, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "epsilon", "uploads"),
    [
        # mu = 1 of an upload: 4.377, 6.573, 8.385, 9.997, 11.480, 12.871 for one, two, ... uploads
        ("gaussian", 8.0, 2),
        ("gaussian", 12.0, 5),
        ("gaussian", 0.1, 0),
        # pure epsilon 1 is mu = 1.2322: 8.447 for two uploads, 10.833 for three
        ("laplace", 10.0, 2),
        (None, 0.1, 9),
    ],
)
def test_an_owner_limits_the_epsilon_of_all_runs(victim, mechanism, epsilon, uploads):
    """A server that proposes longer experiments, or many, would get more uploads."""
    noise = LOCAL if mechanism is None else LOCAL.replace("}", f', mechanism="{mechanism}"}}')
    order = 1 if mechanism == "laplace" else 2
    limit = {"most-rounds": 9} | ({"most-epsilon": epsilon} if mechanism else {})
    node = victim(noise, "sampler.name=full", **limit)
    protection = Protection(
        0.5, order, tuple(node.theta()), noise_scale=1.0, mechanism=mechanism or "gaussian"
    )
    clients = [
        node.train(node.order(protection=protection), run=f"{run:016x}").clients
        for run in range(10)
    ]
    assert clients == [18] * uploads + [0] * (10 - uploads)


@pytest.mark.slow
def test_an_owner_who_insists_on_noise_limits_the_epsilon_of_all_runs(victim):
    """By default 20: 11 uploads with mu = 1 cost 19.005, 12 cost 20.125."""
    owner = {"least-noise": 1.0, "most-rounds": 20}
    node = victim(LOCAL, "sampler.name=full", **owner)
    order = node.order(protection=local(names=node.theta()))
    clients = [node.train(order, run=f"{run:016x}").clients for run in range(13)]
    assert clients == [18] * 11 + [0] * 2


@pytest.mark.parametrize(("setting", "uploads"), [("step.epsilon=1.0", 2), ("step.mode=paper", 0)])
def test_noise_of_a_step_has_a_cost(victim, setting, uploads):
    """Of one release as DP-VAE claims it, mu = 2 / 4.845; noise without a guarantee has none."""
    step = (*DPVAE, "step.budgets=equal")
    node = victim(*step, setting, **{"most-epsilon": 2.5, "most-rounds": 9})
    sent = [node.train(node.order(), run=f"{run:016x}").clients for run in range(4)]
    assert sent == [18] * uploads + [0] * (4 - uploads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "ends"),
    [
        ({"reply-interval": 5.0}, [5.0, 10.0, 5.0]),
        ({"least-noise": 1.0}, [3.0, 8.0, 1.0]),
        ({"least-noise": 1.0, "reply-interval": 0.0}, [2.5, 7.25, 0.5]),
        ({}, [2.5, 7.25, 0.5]),
    ],
)
def test_replies_leave_at_multiples_of_the_owners_interval(victim, monkeypatch, owner, ends):
    """Also those to an order that fails."""
    clock = SimpleNamespace(now=100.0, work=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(reply_times, "time", clock)

    @contextmanager
    def work(*_):
        clock.now += clock.work
        yield

    monkeypatch.setattr("clients.app._ended_after", work)
    node = victim(LOCAL, "sampler.name=full", **owner)
    theta, found = node.theta(), []
    order = node.order(protection=local(names=theta))
    for clock.work, given in ((2.5, order), (7.25, order), (0.5, node.order())):
        before = clock.now
        with suppress(RefusalError):
            node.ask("train", pack_order(given, to_record(theta)))
        found.append(clock.now - before)
    assert found == pytest.approx(ends)


def test_participations_of_a_step_are_counted_over_all_runs(victim):
    node = victim(*DPVAE, "step.participations=1", **{"most-rounds": 100})
    assert [node.train(node.order(), run=f"{run:016x}").clients for run in range(3)] == [18, 0, 0]


def test_no_loss_and_no_number_of_examples_goes_beside_local_noise(victim):
    """They have no noise, in any mode."""
    node = victim(LOCAL, "sampler.name=full")
    answer = node.train(node.order(protection=local(names=node.theta())))
    assert answer.clients == 18
    assert (answer.examples, answer.loss, answer.losses) == (0, 0.0, 0)
