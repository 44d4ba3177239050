# SPDX-License-Identifier: Apache-2.0
"""What the process of a node imports: each library takes its memory in every one of them."""

import subprocess
import sys

import pytest

from fedrec.experiment.loading import load

NODE = """
import sys
from flwr.app import Context, Message, RecordDict
from clients.app import app
from fedrec.protocol.messages import HELLO, INITIAL, pack_evaluate, pack_train, unpack_presence
from fedrec.protocol.orders import EvaluateOrder, TrainOrder
from simulations.engines.flwr_private import identify_server
identify_server()
run_config = {"resolved": sys.argv[1], "output": ""}
context = Context(1, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), run_config)
ask = lambda kind, content: app(Message(content, 2, kind), context).content
arrays = next(iter(ask(INITIAL, RecordDict()).array_records.values()))
presence = unpack_presence(ask(HELLO, RecordDict()))
assert ask("train", pack_train(arrays, TrainOrder(1, presence.training))).array_records
assert ask("evaluate", pack_evaluate(arrays, EvaluateOrder(1, presence.evaluated))).array_records
print(sorted({"pandas", "scipy.sparse", "scipy.special"} & set(sys.modules)))
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
