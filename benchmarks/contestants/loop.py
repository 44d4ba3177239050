# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop over the users of a round, in one process; `--sparse` uses sparse embedding gradients."""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.contestants.plain_torch import Arrays, Net, batches, train


def main(path: str, sparse: bool) -> None:
    """Do the work and print seconds per round and the sum of squared parameters."""
    torch.set_num_threads(1)
    work = Arrays(path)
    net = Net(work, sparse=sparse)
    rounds, cohort = work["cohorts"].shape
    users = torch.from_numpy(work["users"])
    seconds = []
    for number in range(rounds):
        started = time.perf_counter()
        theta = {name: value.detach().clone() for name, value in net.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for place in range(cohort):
            net.load_state_dict(theta)
            train(net, users[number, place], batches(work, number * cohort + place))
            for name, value in net.state_dict().items():
                total[name] += value - theta[name]
        net.load_state_dict({name: theta[name] + total[name] / cohort for name in theta})
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds, "squared_sum": net.squared_sum()}))


if __name__ == "__main__":
    main(sys.argv[1], "--sparse" in sys.argv)
