# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop over the users of a round, in one process; `--sparse` uses sparse embedding
gradients.

Arguments: work, device.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.archive import Arrays, RoundClock
from benchmarks.contestants.plain_torch import Net, batches, train, update


def main(path: str, device: str, sparse: bool) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    torch.set_num_threads(1)
    work = Arrays(path)
    net = Net(work, sparse=sparse).to(device)
    rounds, cohort = work["cohorts"].shape
    users = torch.from_numpy(work["users"]).to(device)
    clock = RoundClock()
    for number in range(rounds):
        clock.begin()
        theta = {name: value.detach().clone() for name, value in net.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for place in range(cohort):
            net.load_state_dict(theta)
            train(net, users[number, place], batches(work, number * cohort + place, device))
            for name, moved in update(net, theta, work.clip).items():
                total[name] += moved
        net.load_state_dict({name: theta[name] + total[name] / cohort for name in theta})
        if device != "cpu":
            torch.cuda.synchronize()
        clock.end()
    print(clock.report(net.arrays(), Net(work, sparse=False).arrays()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--sparse" in sys.argv)
