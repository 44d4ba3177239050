# SPDX-License-Identifier: Apache-2.0
"""What a true epsilon costs in Hits@20 on MovieLens-1M: tables of docs/papers/privrec.md and
docs/papers/federated-peers.md.

    FEDREC_DATA=DATA python -m simulations.reproduce.grids.privacy_frontier --output FOLDER
    FEDREC_DATA=DATA python -m simulations.reproduce.grids.privacy_frontier --output FOLDER \\
        --validation --seeds 1

Each system is a shipped experiment at several epsilons; settings that depend on epsilon were
chosen on validation users. Each seed has its own split and its own noise, and is compared user by
user with a centralised private system of the same epsilon: private popularity, or `dp-gram` for the
systems that release products of items once. Finished runs in the folder are reused, and an
interrupted frontier continues where it stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedrec.errors import RunError
from fedrec.experiment.loading import load
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from simulations import runner
from simulations.reproduce.grids.targeted_tables import interval

_ONE_RATE = "strategy.main.server-lr"
_STAGE_RATE = "strategy.main.stage-one.strategy.server-lr"
_MAIN_RATE = "strategy.main.main.server-lr"
_ENGINE = ["engine.name=serial"]
_LAPLACE = {"name": "dp-popularity", "mechanism": "laplace", "clip-norm": 40.0}


@dataclass(frozen=True)
class Point:
    """One system at one epsilon.

    Attributes:
        system: how the table names it.
        experiment: the shipped experiment.
        epsilon: the target; infinite for clipping without noise.
        overrides: further settings.
        beside: baselines of the same epsilon, by name with their settings; the last one is compared
            with.
    """

    system: str
    experiment: str
    epsilon: float
    overrides: tuple[str, ...]
    beside: tuple[Mapping[str, object], ...] = ({"name": "dp-popularity"},)

    def settings(self) -> list[str]:
        """All overrides; without noise the clip stays, so that nothing else differs."""
        if math.isinf(self.epsilon):
            return ["privacy.noise-multiplier=0.0", *self.overrides]
        return [f"privacy.epsilon={self.epsilon}", *self.overrides]


def points() -> Iterator[Point]:
    """The points of the frontier, the most important ones first."""
    one = {5.0: 17000.0, 2.0: 8000.0, 15.0: 25000.0, math.inf: 25000.0}
    two = {5.0: 20000.0, 2.0: 8000.0, 15.0: 25000.0, math.inf: 25000.0}
    for epsilon in (5.0, 2.0, 15.0, math.inf):
        stages = (f"{_STAGE_RATE}={two[epsilon]}", f"{_MAIN_RATE}={two[epsilon] / 2}")
        yield Point("DP-PrivRec", "dp-privrec-ml1m", epsilon, stages)
        yield Point(
            "DP-PrivRec-One", "dp-privrec-one-ml1m", epsilon, (f"{_ONE_RATE}={one[epsilon]}",)
        )
        if math.isfinite(epsilon):
            yield Point("LM-PrivRec", "lm-privrec-ml1m", epsilon, (), (_LAPLACE,))
    yield from _one_release()


@dataclass(frozen=True)
class _Release:
    """Settings of one release of counts and products.

    Attributes:
        items: number of items that products are about.
        count_share: share of the budget (of mu^2) that the counts take.
        model: further settings of the experiment.
    """

    items: int
    count_share: float
    model: tuple[str, ...] = ()

    def overrides(self) -> tuple[str, ...]:
        """The same as settings of an experiment."""
        factor = ((1 - self.count_share) / self.count_share) ** 0.5
        share = f"privacy.phases.popularity.noise-factor={factor:.6f}"
        return (f"model.items={self.items}", share, *self.model)


_FEWER_COUNTS = "privacy.phases.popularity.clip-norm=5.0"
_FOLD_IN = {
    1.0: _Release(300, 0.5, (_FEWER_COUNTS, "strategy.main.damping=1.0")),
    2.0: _Release(300, 0.3, (_FEWER_COUNTS,)),
    5.0: _Release(600, 0.2),
    15.0: _Release(800, 0.1, ("strategy.main.damping=0.4",)),
}
_PURE_SVD = {
    1.0: _Release(250, 0.1, ("strategy.main.factors=3",)),
    2.0: _Release(300, 0.1, ("strategy.main.factors=8",)),
    5.0: _Release(500, 0.06, ("strategy.main.factors=12",)),
    15.0: _Release(1000, 0.1, ("strategy.main.factors=24",)),
}


def _one_release() -> Iterator[Point]:
    """Systems of one release of counts and one of products, in order of epsilon."""
    for epsilon, svd in _PURE_SVD.items():
        factors = int(svd.model[0].partition("=")[2])
        gram = {
            "name": "dp-gram",
            "items": svd.items,
            "factors": factors,
            "count-share": svd.count_share,
        }
        own = _FOLD_IN[epsilon].overrides()
        yield Point("Fold-in", "fed-fold-in-ml1m", epsilon, own, (gram,))
        fewer = {**gram, "adjacency": "add-remove"}
        yield Point("Fold-in, +-1", "fed-fold-in-add-remove-ml1m", epsilon, own, (fewer,))
        yield Point("PureSVD", "dp-fed-gram-ml1m", epsilon, svd.overrides(), (gram,))


def run(point: Point, seed: int, folder: Path, *, validation: bool) -> Result:
    """The result of a point with one seed, from its folder or by running it."""
    path = (
        folder / f"{point.experiment}-{point.epsilon:g}-{seed}{'-validation' if validation else ''}"
    )
    if (path / "result.json").exists():
        return RunFolder(path).read_result()
    if path.exists():
        return runner.resume(path)
    held_out = (
        ["split.validation-users=0.1", "evaluation.held-out=validation"] if validation else []
    )
    # `epsilon` and `noise-multiplier` exclude each other, so a run without noise starts from a
    # table without epsilon.
    table = load(point.experiment).table()
    if math.isinf(point.epsilon):
        del table["privacy"]["epsilon"]
    noise = {"seed": seed, "epsilon": point.epsilon}
    finite = math.isfinite(point.epsilon)
    private = [{**settings, **noise} for settings in point.beside] if finite else []
    table["evaluation"]["baselines"] = ["popularity", *private]
    experiment = load(table, [*point.settings(), *held_out, *_ENGINE, f"seed={seed}"])
    return runner.run(experiment, output=path)


def gap(result: Result, baseline: str, metric: str = "hits@20") -> tuple[float, float]:
    """How far a system is above one of its run's baselines, paired by user.

    Returns:
        Mean of the differences over the users, and half the width of its 95 % interval.

    Raises:
        RunError: the users of that baseline were not saved, or do not have its mean.
    """
    users = result.baseline_users.get(baseline)
    mean = result.baselines[baseline][metric]
    found = math.nan if users is None else float(np.mean(users[metric].to_numpy()))
    if users is None or not math.isclose(found, mean, abs_tol=1e-9):
        raise RunError(
            f"{baseline} is not what it was in {result.folder}",
            expected=f"users with a mean {metric} of {mean:.6f}, as in baselines.json",
            got="no users" if users is None else f"{found:.6f}",
            fix="run that point again, in another folder",
        )
    values = users.loc[result.users.index, metric].to_numpy()
    differences = result.users[metric].to_numpy() - values
    return interval(differences[~np.isnan(differences)].tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the frontier and print, per system and epsilon, mean and spread over the seeds, and what
    each seed shows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds; each has its own split and noise"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="seeds before it are left out")
    parser.add_argument(
        "--validation", action="store_true", help="rank validation users instead of test users"
    )
    parser.add_argument(
        "--only", default="", help="names of experiments, separated by commas; default: all"
    )
    parser.add_argument("--epsilons", default="", help="such as 2,5,inf; default: all")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.only.split(",") if name]
    epsilons = [float(text) for text in options.epsilons.split(",") if text]
    for point in points():
        if (wanted and point.experiment not in wanted) or (
            epsilons and point.epsilon not in epsilons
        ):
            continue
        seeds = range(options.first_seed, options.seeds)
        results = [
            run(point, seed, options.output, validation=options.validation) for seed in seeds
        ]
        print(_line(point, results), flush=True)
        for seed, result in zip(seeds, results, strict=True):
            print(_seed_line(seed, result), flush=True)


def _line(point: Point, results: list[Result]) -> str:
    own = np.array([result.metrics["hits@20"] for result in results])
    beside = [
        f"{name} {np.mean([result.baselines[name]['hits@20'] for result in results]):.4f}"
        for name in results[0].baselines
    ]
    spread = f" +- {own.std(ddof=1):.4f} (sd over seeds)" if len(own) > 1 else ""
    return (
        f"{point.system:16} epsilon {point.epsilon:<4g} Hits@20 {own.mean():.4f}{spread} "
        f" ({', '.join(beside)})"
    )


def _seed_line(seed: int, result: Result) -> str:
    baseline = list(result.baselines)[-1]  # the private one, if there is one
    mean, half = gap(result, baseline)
    found = (
        f"{result.metrics['hits@20']:.4f}, {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"
    )
    return (
        f"    seed {seed}: {found} against {baseline} {result.baselines[baseline]['hits@20']:.4f},"
        " by user"
    )


if __name__ == "__main__":
    main()
