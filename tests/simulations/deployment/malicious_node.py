# SPDX-License-Identifier: Apache-2.0
"""The executor of a malicious node: takes the flags of an executor, and sends false replies by
round.

By the number of the round: 1 wrong shapes, 2 NaN, 3 infinities, 4 a million times too large, 5 more
clients than asked, 6 unknown parameters, 7 no arrays, 8 an error with a long text, 9 bytes of other
arrays. In its first reply it claims the clients in the environment variable MALICIOUS_CLAIMS in
addition to its own.
"""

import os
import sys

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.app import app as honest
from fedrec.protocol.messages import (
    Presence,
    TrainSum,
    pack_arrays,
    pack_presence,
    pack_sum,
    unpack_presence,
    unpack_sum,
)
from fedrec.protocol.serialization import for_the_network, from_the_network
from simulations.deployment import supernode

app = ClientApp()


@app.query("hello")
def hello(message, context):
    answer = honest(message, context)
    presence = unpack_presence(from_the_network(answer.content))
    claims = np.array(
        [int(part) for part in os.environ.get("MALICIOUS_CLAIMS", "").split(",") if part],
        dtype=np.int64,
    )
    ids = np.union1d(presence.training, claims)
    lie = Presence(presence.partition, ids, presence.evaluated, np.full(len(ids), 10**9))
    return Message(for_the_network(pack_presence(lie)), reply_to=message)


@app.query("initial")
def initial(message, context):
    nothing = {"user.gender": np.full((2, 2), np.nan, np.float32)}
    return Message(for_the_network(pack_arrays(nothing)), reply_to=message)


def _dense(value):
    return value if isinstance(value, np.ndarray) else value.dense().astype(np.float32)


@app.train()
def train(message, context):
    number = int(next(iter(message.content.config_records.values()))["server-round"])
    answer = honest(message, context)
    honest_sum = unpack_sum(from_the_network(answer.content))
    total = {name: _dense(value) for name, value in honest_sum.total.items()}
    change = {
        1: lambda: {name: np.zeros((7, *value.shape), np.float32) for name, value in total.items()},
        2: lambda: {
            name: np.full(value.shape, np.nan, np.float32) for name, value in total.items()
        },
        3: lambda: {
            name: np.full(value.shape, np.inf, np.float32) for name, value in total.items()
        },
        4: lambda: {name: (value * 1e6).astype(np.float32) for name, value in total.items()},
        6: lambda: {**total, "evil": np.zeros(3, np.float32)},
    }.get(number, lambda: total)()
    clients = 10**6 if number == 5 else honest_sum.clients
    lie = TrainSum(
        change, clients, honest_sum.weight, honest_sum.examples, honest_sum.loss, honest_sum.losses
    )
    content = for_the_network(pack_sum(lie))
    if number == 7:
        content = RecordDict(
            {"metrics": MetricRecord({"num-examples": 1}), "config": ConfigRecord({"a": b"\x00"})}
        )
    if number == 8:
        raise RuntimeError("x" * 10_000)
    if number == 9:
        for record in content.array_records.values():
            for array in record.values():
                array.data = b"\x93NUMPY\x01\x00" + os.urandom(50)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    raise RuntimeError("no")


if __name__ == "__main__":
    supernode.client_executor(sys.argv[1:], lambda *_: app)
