# SPDX-License-Identifier: Apache-2.0
"""pfl-research (PyPI `pfl`) with PyTorch, as its benchmarks use it; `--sparse` uses sparse
embedding gradients.

Started by `torchrun` it splits a cohort over processes (no MPI needed) and sums their statistics by
all-reduce.

Chosen in its favour, all of it pfl's own:
- one thread per process: batches of 32 are too small to share among threads;
- users as tensors in memory (`PyTorchTensorDataset`), so that nothing is converted per batch;
- `user_id_to_weight`: pfl then spreads a cohort's users over the processes by their number of
  examples;
- no evaluation in counted rounds (pfl always evaluates in the first), no metrics printed, no
  postprocessors but its own clipping where the work clips.
The cohorts and the order of the examples are those of the work, so the sampler walks the work's
users in order, and one local epoch of pfl is all epochs of the work, each in its own order.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import NormClippingOnly

from benchmarks.contestants.archive import BATCH, LEARNING_RATE, Arrays, RoundClock
from benchmarks.contestants.loop import Net


class PflNet(Net):
    """The network with the two methods that pfl asks for."""

    def loss(self, items: torch.Tensor, labels: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self(user, items), labels)

    @torch.no_grad()
    def metrics(
        self, items: torch.Tensor, labels: torch.Tensor, user: torch.Tensor
    ) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(items, labels, user).item() * len(items), len(items))}


class UserDataset(PyTorchTensorDataset):
    """One user. One pass goes through all epochs of the work: pfl has one order of examples for all
    its epochs."""

    def __init__(self, work: Arrays, index: int) -> None:
        self._epochs = [tuple(map(torch.from_numpy, epoch)) for epoch in work.epochs(index)]
        user = {"user": torch.from_numpy(work["users"].reshape(-1, work["users"].shape[-1])[index])}
        super().__init__(self._epochs[0], user_id=index, train_kwargs=user, eval_kwargs=user)

    def iter(self, batch_size: int | None) -> Iterator[tuple[torch.Tensor, ...]]:
        for items, labels in self._epochs:
            size = batch_size or len(items)
            yield from zip(items.split(size), labels.split(size), strict=True)


class Timer(TrainingProcessCallback):
    """A round lasts from the end of the one before to its own end: pfl does nothing in between."""

    def __init__(self) -> None:
        self.clock = RoundClock()

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock.end()
        return False, Metrics()


def main(path: str, sparse: bool) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    torch.set_num_threads(1)
    work = Arrays(path)
    net = PflNet(work, sparse=sparse)
    rounds, cohort = work["cohorts"].shape
    indices = range(rounds * cohort)
    users = FederatedDataset(
        lambda index: UserDataset(work, index),
        itertools.cycle(indices).__next__,
        user_id_to_weight={index: int(work["lengths"][index]) for index in indices},
    )
    timer = Timer()
    postprocessors = [NormClippingOnly(2.0, work.clip)] if work.clip else []
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=users, val_data=users, postprocessors=postprocessors
        ),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LEARNING_RATE
        ),
        callbacks=[timer],
        send_metrics_to_platform=False,
    )
    if pytorch_ops.distributed.global_rank == 0:
        print(timer.clock.report(net.arrays(), Net(work, sparse=False).arrays()))


if __name__ == "__main__":
    main(sys.argv[1], "--sparse" in sys.argv)
