# SPDX-License-Identifier: Apache-2.0
"""Nodes as hosts: clients, training paths and batches drawn ahead."""

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from clients.app import node_of
from clients.evaluation import requested_items
from clients.node import Node, TrainingPath, _training_path
from clients.steps.fedgnn import FedgnnStep
from clients.steps.personal import GpfedrecStep
from clients.steps.sgd import Sgd
from fedrec.components.sections import Section
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.protocol.messages import ItemQuery
from fedrec.rng import stream


def test_client_c_lives_on_node_c_mod_n(load_tiny, world):
    nodes = [Node(load_tiny(), place, 2, None) for place in range(2)]
    for node in nodes:
        node.population = world()
    assert [node.training.tolist() for node in nodes] == [[0, 2], [1]]
    assert [node.evaluated.tolist() for node in nodes] == [[0, 2], [1]]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_nodes_together_host_every_client_once(load_tiny, count):
    nodes = [Node(load_tiny(), place, count, None) for place in range(count)]
    whole = nodes[0].population
    together = np.concatenate([node.training for node in nodes])
    assert np.array_equal(np.sort(together), whole.partition.training_clients)
    assert len(together) == 18
    together = np.concatenate([node.evaluated for node in nodes])
    assert np.array_equal(np.sort(together), whole.evaluated_clients("test"))


def context(experiment, place=0, nodes=1, output=""):
    run_config = {"resolved": experiment.model_dump_json(), "output": output}
    return Context(1, 2, {"partition-id": place, "num-partitions": nodes}, RecordDict(), run_config)


def test_a_context_names_a_node_that_is_made_once(load_tiny, tmp_path):
    node = node_of(context(load_tiny(), 1, 3, str(tmp_path)))
    assert (node.partition, node.nodes) == (1, 3) and node.experiment == load_tiny()
    assert node.private.file == tmp_path / "private" / "node-1.sqlite"
    assert node_of(context(load_tiny(), 1, 3, str(tmp_path))) is node
    other = node_of(context(load_tiny(), 2, 3, str(tmp_path)))
    # the data are read once per process
    assert other is not node and other.population is node.population
    assert (
        node_of(context(load_tiny("seed=1"), 1, 3, str(tmp_path))).population is not node.population
    )


def test_without_a_folder_there_is_no_private_state(load_tiny):
    assert node_of(context(load_tiny())).private is None


def test_a_context_without_an_experiment_is_refused():
    with pytest.raises(ExperimentError, match="names no experiment"):
        node_of(Context(1, 2, {}, RecordDict(), {}))


# The choice of the training path: the fastest that is supported, with the reason; an error if the
# requested path is not supported.


def path_of(node, **options):
    section = Section.model_validate({"name": "sgd", "batch-size": 8, **options})
    return _training_path(node.step(section), node.model, node.experiment.engine)


def test_the_fastest_supported_path_is_taken_with_the_reason(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    assert path_of(node) == TrainingPath("kernel") and str(path_of(node)) == "kernel"
    assert path_of(node, rates={"item.id": 2.0}, **{"late-parameters": ["item.*"]}) == TrainingPath(
        "kernel"
    )
    found = path_of(node, **{"proximal-mu": 0.5})
    assert found.name == "blocks" and "plain SGD" in str(found)
    assert path_of(node, **{"private-parameters": ["item.*"]}).name == "reference"
    assert node.paths == {"sgd": "kernel"}


def test_a_step_without_a_kernel_gives_the_reason(load_tiny):
    node = Node(load_tiny("step={name='contrastive', encoder='mean'}"), 0, 1, None)
    assert node.paths == {"contrastive": "blocks (step Contrastive has no kernel)"}


@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_a_path_can_be_asked_for(load_tiny, path):
    assert path_of(Node(load_tiny(f"engine.path={path}"), 0, 1, None)) == TrainingPath(path)


def test_the_kernel_is_refused_with_the_reason_where_it_does_not_fit(load_tiny, run_tiny):
    node = Node(load_tiny("engine.path=kernel"), 0, 1, None)
    with pytest.raises(
        ExperimentError,
        match=r"(?s)cannot be trained by the kernel.*got: .*plain SGD.*leave out engine",
    ):
        path_of(node, proximal_mu=0.5)
    with pytest.raises(ExperimentError, match="without a proximal term"):
        run_tiny("engine.path=kernel", "step.proximal-mu=0.5")


def test_bfloat16_and_gpus_train_in_blocks(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    engine = node.experiment.engine.model_copy(update={"precision": "bf16"})
    assert _training_path(node.step(node.experiment.step), node.model, engine).name == "blocks"
    step = node.step(node.experiment.step)
    step.device = step.device.__class__("cuda")
    assert "not on cuda" in str(_training_path(step, node.model, node.experiment.engine))


class OtherBatches(Sgd):
    def batches(self, data, random):
        return super().batches(data, random)


def test_a_step_with_other_batches_does_not_inherit_the_kernel(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    step = OtherBatches(node.step(node.experiment.step).config, node.model, node.device)
    found = _training_path(step, node.model, node.experiment.engine)
    assert found.name == "blocks" and "OtherBatches overrides" in found.reason


def test_a_phase_that_trains_nothing_is_no_obstacle_to_the_kernel(load_tiny):
    node = Node(load_tiny("engine.path=kernel"), 0, 1, None)
    counts = Section.model_validate({"name": "counts"})
    assert _training_path(node.step(counts), node.model, node.experiment.engine).name == "blocks"


# The items that a client needs, named before its parameters are generated.

STEP = {"name": "gpfedrec", "epochs": 2, "learning-rate": 0.1}


@pytest.fixture
def node(tiny_experiment, tmp_path_factory):
    def make(step=STEP, model=None):
        model = model or {"name": "gpfedrec", "embedding": 3, "hidden": [4]}
        folder = tmp_path_factory.mktemp("node")
        return Node(load(tiny_experiment() | {"model": model, "step": step}), 0, 1, folder)

    return make


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [("gpfedrec", GpfedrecStep, STEP), ("fedgnn", FedgnnStep, {"name": "fedgnn"})],
)
def test_a_client_asks_for_the_items_of_its_batches(node, name, kind, settings):
    own = node(settings, {"name": name, "embedding": 4})
    clients = own.training[:3]
    requests = requested_items(own, ItemQuery(1, clients, "train", settings))
    step = kind(own.step(own.experiment.step).config, own.model, own.device)
    for client, items in zip(
        clients.tolist(), np.split(requests.items, requests.offsets[1:-1]), strict=True
    ):
        data = own.population.client(client)
        references, named = step.batches(data, stream(0, "client", client, 1)).references()
        assert items.tolist() == sorted(set(references[named].tolist())) and len(items) > 5
