# SPDX-License-Identifier: Apache-2.0
"""Hooks of the whole test suite, and shared fixtures."""

import contextlib
import copy
import gc
import logging
import os
import signal
import sys
import tempfile
import types
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fedrec.report.browser import Browser, executable

pytest.register_assert_rewrite("tests.component_checks")

# The same inputs in every run, however long they take on a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

# Two threads of PyTorch in each of two processes wait for each other on two cores, up to thirty
# times as long as one works. Set before it is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell and nohup let what they start in the background ignore Ctrl-C and hang-ups, which
# processes of tests would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One local Ray and one SuperLink per test process, for tests that need one but do not test its
# start.

CORES, STORE_BYTES = 4, 2**26


class SharedEngines:
    """Starts each engine when it is first needed, and stops it at the end, or before a test that
    starts its own."""

    def __init__(self):
        self._started = {}

    def of(self, engine):
        """The engine's resources, available until `stop`."""
        if engine not in self._started:
            stack = contextlib.ExitStack()
            found = stack.enter_context({"ray": _ray, "flower": _superlink}[engine]())
            self._started[engine] = stack, found
        return self._started[engine][1]

    def stop(self, *engines):
        """Stop some engines; without names, all."""
        for engine in engines or tuple(self._started):
            stack, _ = self._started.pop(engine, (contextlib.nullcontext(), None))
            if isinstance(stack, contextlib.ExitStack):
                stack.close()


ENGINES = SharedEngines()


@contextlib.contextmanager
def _ray():
    import ray

    from simulations.engines.ray import alone, connect

    with alone():
        connect(None, CORES, STORE_BYTES)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _superlink():
    """Port and environment of a SuperLink with simulations."""
    from simulations.engines import flower

    with tempfile.TemporaryDirectory(prefix="fedrec-tests-") as folder:
        port = flower._free_port()
        environment = flower._environment(Path(folder) / "home", port)
        with flower._superlink(types.SimpleNamespace(path=Path(folder)), environment, port):
            yield port, environment


@pytest.fixture
def shared_engine(request, monkeypatch):
    """Runs of the engine in the test's parameter `engine`, of Ray without one, join the Ray or the
    SuperLink that all tests of this process share."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    engine = params.get("engine", "ray")
    found = ENGINES.of(engine)
    if engine == "flower":
        port, environment = found
        monkeypatch.setattr("simulations.engines.flower._free_port", lambda: port)
        monkeypatch.setattr("simulations.engines.flower._environment", lambda *_: environment)
        monkeypatch.setattr(
            "simulations.engines.flower._superlink", lambda *_: contextlib.nullcontext()
        )


ON_DEMAND = {
    "deployment": "make deploy-test",
    "containers": "make container-test",
    "cluster": "make cluster-test",
}
"""Markers of tests that run on request only, and the command."""


def pytest_collection_modifyitems(config, items):
    """Tests on raw data are skipped if the data are missing, and long tests of real processes
    unless requested."""
    for marker, command in ON_DEMAND.items():
        for item in items if marker not in config.option.markexpr else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=command))
    if os.environ.get("FEDREC_DATA"):
        return
    for item in items:
        if item.get_closest_marker("real_data"):
            item.add_marker(pytest.mark.skip(reason="FEDREC_DATA is not set"))


def pytest_runtest_setup(item):
    """Stop the shared Ray before a test that starts its own."""
    if item.get_closest_marker("ray") and "shared_engine" not in item.fixturenames:
        ENGINES.stop("ray")


def pytest_sessionfinish(session):
    """Stop the shared engines."""
    ENGINES.stop()


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Exclude objects that exist before a file's tests, such as modules and collected tests, from
    garbage collections, which would take ten times as long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def files_without_sync():
    """Do not sync files: a run does so 18 times, and no test cuts the power. Tests that replace
    `os.fsync` themselves check what is synced, and in which order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tiny_experiment():
    """Makes the table of an experiment with 24 users (18 of them train) that runs in a fraction of
    a second: that of the contracts, with fine-tuning on the device."""
    from simulations.contracts.base import SMALL

    evaluation = {**SMALL["evaluation"], "fine-tune": {"epochs": 1}}
    return lambda: copy.deepcopy({**SMALL, "name": "tiny", "evaluation": evaluation})


@pytest.fixture(scope="session")
def load_tiny(tiny_experiment):
    """Loads the tiny experiment with overrides."""
    from fedrec.experiment.schema import load

    return lambda *overrides: load(tiny_experiment(), overrides)


@pytest.fixture
def run_tiny(tiny_experiment, tmp_path):
    """Runs the tiny experiment with overrides in the folder `tmp_path / output`."""
    from simulations import runner

    def run(*overrides, output="run", callbacks=()):
        return runner.run(
            tiny_experiment(), overrides, output=tmp_path / output, callbacks=callbacks
        )

    return run


@pytest.fixture
def tiny_file(tiny_experiment, tmp_path):
    """The tiny experiment as a TOML file."""
    import tomli_w

    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(tiny_experiment()))
    return file


@pytest.fixture
def fedrec(capsys, monkeypatch):
    """Calls the command line in this process, with overrides `sets` of an experiment: exit status,
    standard output, standard error."""
    from simulations import cli

    # they may have a stream of an earlier test
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])

    def call(*arguments, sets=()):
        changes = [word for override in sets for word in ("--set", override)]
        monkeypatch.setattr(sys, "argv", ["fedrec", *map(str, arguments), *changes])
        with pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        code = ended.value.code
        code = code if isinstance(code, int) else int(code is not None)
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def first_sums():
    """Returns the reply of a node after the first round of its first 18 clients, as whole arrays
    and as sent."""
    import numpy as np

    from clients.round import train_clients
    from fedrec.protocol.messages import TrainOrder
    from fedrec.protocol.updates import dense_change
    from fedrec.rng import torch_stream

    def train(node):
        arrays = {
            name: value.numpy()
            for name, value in node.model.initial(torch_stream(0, "init")).items()
        }
        reply = train_clients(node, arrays, TrainOrder(1, np.arange(0, 18), "uniform"))
        return {name: dense_change(change) for name, change in reply.total.items()}, reply

    return train


@pytest.fixture(scope="session")
def identity():
    """Lets tests make Flower messages."""
    from simulations.engines.grid import identify_server

    identify_server()


@pytest.fixture(scope="session")
def world():
    """Four users and six items by hand: a repeated row, a user without positives, one without
    training rows."""
    import numpy as np

    from fedrec.data.interactions import Feature, FeatureTable, Interactions
    from fedrec.data.population import Population
    from fedrec.data.splits.rules import Partition

    users = (
        Feature.single("gender", ["F", "M", "F", "M"]),
        Feature.multiple("hobby", [["a", "b"], [], ["b"], ["a"]]),
    )
    genres = Feature.multiple("genres", [["x"], ["x", "y"], [], ["y"], ["x"], ["y"]])
    rows = np.array(
        [
            (0, 0, 5), (0, 1, 2), (0, 2, 4), (0, 3, 1),
            (1, 1, 5), (1, 1, 4), (1, 4, 5), (1, 4, 5), (1, 0, 4),
            (2, 5, 1), (2, 0, 5),
            (3, 2, 2),
        ]
    )  # fmt: skip
    interactions = Interactions(
        name="world",
        users=rows[:, 0],
        items=rows[:, 1],
        user_ids=np.arange(4),
        item_ids=np.arange(6),
        user_features=FeatureTable(4, users),
        item_features=FeatureTable(6, (genres,)),
        ratings=rows[:, 2],
    )
    train = np.array([0, 1, 4, 5, 9])
    validation = np.array([8])
    test = np.array([2, 3, 6, 7, 10, 11])
    partition = Partition(np.array([0, 1, 2]), train, validation, test)

    def make(task="ranking", positive_above=3.0):
        above = None if task == "rating" else positive_above
        return Population(interactions, partition, task=task, positive_above=above)

    return make


@pytest.fixture(scope="session")
def torch_privrec():
    """An independent PrivRec for one client, item by item, of means of rows and of linear layers.

    Its `values` are leaves by PrivRec's names.
    """
    import torch
    from torch.nn import functional as F

    class TorchPrivRec:
        def __init__(self, model, parameters):
            self.values = {n: v.clone().requires_grad_() for n, v in parameters.items()}
            self.activation = getattr(torch, model.config.activation)
            self.users = [f"user.{name}" for name, _ in model.schema.user_features]
            self.items = {
                f"item.{feature.name}": torch.from_numpy(feature.padded())
                for feature in model.schema.item_features.features
            }

        def mean_row(self, name, codes):
            table = self.values[name]
            codes = codes[codes >= 0]
            return table[codes].mean(0) if len(codes) else torch.zeros(table.shape[1])

        def one(self, users, item):
            parts = [self.mean_row(*pair) for pair in zip(self.users, users, strict=True)]
            parts.append(self.values["item.id"][item])
            parts += [self.mean_row(name, codes[item]) for name, codes in self.items.items()]
            hidden = torch.cat(parts)
            last = sum(name.endswith(".weight") for name in self.values) - 1
            for layer in range(last + 1):
                weight, bias = (self.values[f"layer{layer}.{part}"] for part in ("weight", "bias"))
                hidden = F.linear(hidden, weight.T, bias)
                hidden = self.activation(hidden) if layer < last else hidden
            return hidden[0]

        def __call__(self, users, items):
            return torch.stack([self.one(users, item) for item in items])

    return TorchPrivRec


@pytest.fixture(scope="session")
def leftovers():
    """Processes whose environment contains a mark; waits up to 20 seconds until there is none."""
    import time

    def marked(mark):
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environment.read_bytes():
                    found.append(
                        (environment.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:
                continue  # it ended meanwhile, or is not ours
        return found

    def look(mark):
        deadline = time.monotonic() + 20
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        return marked(mark)

    return look


@pytest.fixture(scope="module")
def chromium():
    """Headless Chromium; the tests that ask for it are skipped where none is installed."""
    if (path := executable()) is None:
        pytest.skip("no Chromium is installed")
    browser = Browser(path)
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium, page):
    """The same, with the file `page` of the module shown on a desktop."""
    chromium.show()
    chromium.open(page)
    return chromium
