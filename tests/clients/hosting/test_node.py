# SPDX-License-Identifier: Apache-2.0
"""Nodes: which clients each hosts, and that a node is made once."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from clients.hosting.node import Node
from clients.node_of_context import node_of
from fedrec.cohort.batches import Batches
from fedrec.errors import ExperimentError


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


@pytest.mark.parametrize(
    ("path", "blocks"), [("reference", [[0], [1], [2]]), ("blocks", [[0, 1, 2]])]
)
def test_the_reference_trains_one_client_after_the_other(load_tiny, path, blocks):
    node = Node(load_tiny(f"engine.path={path}"), 0, 1, None)
    batches = [Batches.whole([(np.arange(3), np.ones(3, dtype=np.float32))])] * 3
    assert list(node.blocks(batches, {"weight": torch.zeros(2)}, [], False)) == blocks
