# SPDX-License-Identifier: Apache-2.0
"""How long centralised systems take on MovieLens-1M, and iALS beside `implicit`'s.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.central_speed [evaluation|fit|ials]...
        [--threads 2] [--systems user-knn ...] [--pairs 3]

evaluation: all 6,040 users (those with a held-out positive) over the whole catalogue, seconds per
system by wall clock and of CPU, the fastest of three. fit: EASE, iALS (64 factors, 15 sweeps) and
PureSVD. ials: ours and `implicit`'s in turns, with the ratio of each pair of runs, which other work
on the machine slows down alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.linear import CentralIals
from fedrec.data.population import POPULATIONS
from fedrec.evaluation.central import CentralEvaluation, make_baseline
from fedrec.experiment.loading import load

EVALUATED = ("popularity", "item-knn", "user-knn", "ease", "puresvd", "ials")
FITTED = ("ease", "ials", "puresvd")
FACTORS = 64
SWEEPS = 15


def lists() -> CentralEvaluation:
    """Every user, with a tenth of the rows held out."""
    experiment = load("central-ml1m", ["split={name='ratio'}"])
    return CentralEvaluation(POPULATIONS.population(experiment), experiment.evaluation)


def clocked(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by wall clock and of CPU."""
    started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def evaluation(protocol: CentralEvaluation, names: Sequence[str]) -> None:
    """Seconds to rank everybody, metrics and statistics of lists included."""
    print(f"{len(protocol.clients)} users, {protocol.training.num_items} items")
    for name in names:
        baseline = make_baseline(name, {})
        protocol.fit(baseline)

        def rank(baseline: Any = baseline) -> None:
            protocol.evaluate(baseline)

        best = min(clocked(rank) for _ in range(4))  # the first makes the masks and compiles
        print(f"{name}: {best[0]:.2f} s by wall clock, {best[1]:.2f} s of CPU", flush=True)


def fit(protocol: CentralEvaluation) -> None:
    """Seconds to fit three systems."""
    total = [0.0, 0.0]
    for name in FITTED:
        baseline = make_baseline(name, {})
        found = clocked(lambda baseline=baseline: protocol.fit(baseline))
        total = [one + other for one, other in zip(total, found, strict=True)]
        print(f"{name}: {found[0]:.2f} s by wall clock, {found[1]:.2f} s of CPU", flush=True)
    print(f"together: {total[0]:.2f} s by wall clock, {total[1]:.2f} s of CPU")


def ials(protocol: CentralEvaluation, threads: int, pairs: int) -> None:
    """Ours and `implicit`'s in turns."""
    from implicit.als import AlternatingLeastSquares  # pyright: ignore[reportMissingImports]
    from scipy.sparse import csr_matrix

    histories: Histories = protocol.training
    liked = csr_matrix(histories.csr())
    config = CentralIals.Config.parse({"factors": FACTORS, "sweeps": SWEEPS})
    ratios = []
    for _ in range(pairs):
        ours = clocked(lambda: CentralIals(config).fit(histories))
        peer = AlternatingLeastSquares(
            factors=FACTORS,
            iterations=SWEEPS,
            regularization=10.0,
            alpha=8.0,
            use_cg=False,
            use_gpu=False,
            num_threads=threads,
        )
        theirs = clocked(lambda peer=peer: peer.fit(liked, show_progress=False))
        ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
        print(
            f"ours {ours[0]:.2f} s ({ours[1]:.2f} CPU), implicit {theirs[0]:.2f} s"
            f" ({theirs[1]:.2f} CPU)",
            flush=True,
        )
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"ours / implicit, median: {wall:.2f} by wall clock, {cpu:.2f} of CPU")


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["evaluation", "fit", "ials"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=EVALUATED)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    protocol = lists()
    if "evaluation" in given.parts:
        evaluation(protocol, given.systems)
    if "fit" in given.parts:
        fit(protocol)
    if "ials" in given.parts:
        ials(protocol, given.threads, given.pairs)


if __name__ == "__main__":
    main()
