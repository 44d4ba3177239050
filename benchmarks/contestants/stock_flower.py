# SPDX-License-Identifier: Apache-2.0
"""Flower as its tutorials use it: one node per user, each message trains one user, FedAvg over the
replies.

The message says which user's work to do, so that the result does not depend on which nodes Flower
picks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.contestants.archive import RoundClock, loaded
from benchmarks.contestants.loop import Net, batches, train, update

USERS = 4800
client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def local(message: Message, context: Context) -> Message:
    """Train the user that the message names."""
    torch.set_num_threads(1)
    config = message.content["config"]
    work = loaded(str(config["path"]))
    net = Net(work, sparse=False)
    theta = message.content["arrays"].to_torch_state_dict()
    net.load_state_dict(theta)
    cohort = work["cohorts"].shape[1]
    index = int(config["place"])
    train(
        net,
        torch.from_numpy(work["users"].reshape(-1, work["users"].shape[-1])[index]),
        batches(work, index),
    )
    trained = net.state_dict()
    if work.clip:
        trained = {
            name: theta[name] + moved for name, moved in update(net, theta, work.clip).items()
        }
    content = RecordDict(
        {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content, reply_to=message) if cohort else message


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The rounds, timed."""
    path = os.environ["FEDREC_BENCHMARK_WORK"]
    work = loaded(path)
    net = Net(work, sparse=False)
    rounds, cohort = work["cohorts"].shape
    while len(nodes := sorted(grid.get_node_ids())) < USERS:
        time.sleep(0.1)
    clock = RoundClock()
    for number in range(rounds):
        clock.begin()
        arrays = ArrayRecord(net.state_dict())
        messages = [
            Message(
                RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord({"path": path, "place": number * cohort + index}),
                    }
                ),
                nodes[(number * cohort + index) % USERS],
                "train",
            )
            for index in range(cohort)
        ]
        answers = list(grid.send_and_receive(messages))
        for answer in answers:
            if answer.has_error():
                raise RuntimeError(answer.error.reason)
        replies = [answer.content["arrays"].to_torch_state_dict() for answer in answers]
        net.load_state_dict(
            {name: sum(reply[name] for reply in replies) / cohort for name in replies[0]}
        )
        clock.end()
    Path(os.environ["FEDREC_BENCHMARK_OUT"]).write_text(
        clock.report(net.arrays(), Net(work, sparse=False).arrays())
    )


if __name__ == "__main__":
    os.environ["FEDREC_BENCHMARK_WORK"] = sys.argv[1]
    os.environ["FEDREC_BENCHMARK_OUT"] = sys.argv[1] + ".flower.json"
    logging.disable(logging.WARNING)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=USERS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2},
        },
    )
    print(Path(os.environ["FEDREC_BENCHMARK_OUT"]).read_text())
