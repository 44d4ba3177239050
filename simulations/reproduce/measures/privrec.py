# SPDX-License-Identifier: Apache-2.0
"""PrivRec's epsilons (tables 4 and 5), and the time of its rounds (figure 9)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize
from fedrec.runs.folder import RunFolder
from simulations.study.runs import finished
from simulations.study.study import Found, TaskJob

ROUNDS = 1000
NOISE = 1.0
DELTAS = (0.0, 1e-8, 1e-6, 1e-4)
BACKENDS = {
    "DP-PrivRec": "paper",
    "each round counted once, autodp": "autodp",
    "each round counted once, PLD": "pld",
}


def epsilons(job: TaskJob, dataset: str, clients: int, cohorts: Sequence[int]) -> Iterator[Found]:
    """The paper's arithmetic, and what 1,000 rounds cost, over cohorts."""
    for cohort, (model, backend) in itertools.product(
        cohorts[:1] if job.quick else cohorts, BACKENDS.items()
    ):
        accountant = Accountant(backend)
        accountant.step(
            NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", NOISE), ROUNDS
        )
        for delta in DELTAS:
            metric = f"epsilon, q={cohort}/{clients}, delta={delta:g}"
            yield Found(dataset, model, metric, accountant.epsilon(delta).epsilon)


def round_time(
    job: TaskJob, dataset: str, experiment: str, row: str, clients: int, set: Sequence[str]
) -> list[Found]:
    """Median milliseconds of training of a round, the first one left out."""
    train = RunFolder(finished(job, experiment, set).folder).timings()["train"].iloc[1:]
    milliseconds = 1000 * float(train.median())
    return [Found(dataset, row, f"ms a round, {clients} clients", milliseconds)]
