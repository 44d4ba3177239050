# SPDX-License-Identifier: Apache-2.0
"""`fedrec audit`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulations.cli.attacks.membership import (
    AsJson,
    Engine,
    Name,
    Output,
    Overrides,
    Quiet,
    prepare,
    save,
    watched,
)

if TYPE_CHECKING:
    from rich.table import Table

    from fedrec.attacks.audit.verdict import Audit
    from simulations.attacks.claims import Claim

_COLUMNS = (
    "run",
    "phase",
    "observer",
    "one-run bound",
    "GDP bound",
    "estimate",
    "95 % interval",
    "claimed epsilon",
)

Clip = Annotated[
    float | None,
    typer.Option(help="Claimed clip norm S (L2) of a client's update; default: from [privacy]."),
]
NoiseStd = Annotated[
    float | None,
    typer.Option(
        help="Claimed standard deviation of the noise in the mean update; default: from [privacy]."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Claimed epsilon, canaries included; default: that without amplification by sampling."
    ),
]
Delta = Annotated[float, typer.Option(help="Delta of the claimed epsilon.")]
Denominator = Annotated[
    float | None, typer.Option(help="Denominator of the mean; default: the cohort size.")
]
Canaries = Annotated[int, typer.Option(min=20, help="Number of canary clients per run.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of runs.")]
Overshoot = Annotated[
    float, typer.Option(help="Norm of the canaries' updates in units of S, to test clipping.")
]
Significance = Annotated[
    float, typer.Option(min=1e-9, max=0.5, help="Probability of a wrong FAIL, in (0, 1).")
]


def audit(
    experiment: Name,
    clip: Clip = None,
    noise_std: NoiseStd = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    denominator: Denominator = None,
    canaries: Canaries = 1000,
    seeds: Seeds = 1,
    overshoot: Overshoot = 10.0,
    significance: Significance = 0.05,
    overrides: Overrides = None,
    engine: Engine = None,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with canary clients and test its privacy claim; the exit status is 1 on
    FAIL.

    The claim is what the run's privacy ledger states for each phase with noise, or the one given by
    --clip and --noise-std.
    """
    from simulations.attacks.audit import audit_experiment

    loaded, folder = prepare(experiment, overrides, engine, output, "audit")
    claim = _claim(clip, noise_std, delta, epsilon, denominator)
    found = watched(
        quiet or as_json,
        lambda calls: audit_experiment(
            loaded,
            claim,
            folder,
            canaries=canaries,
            seeds=seeds,
            overshoot=overshoot,
            significance=significance,
            callbacks=calls,
        ),
    )
    text = save(found.table(), folder / "audit.json")
    typer.echo(text) if as_json else _print_audit(found, folder)
    if found.verdict == "FAIL":
        raise typer.Exit(1)


def _claim(
    clip: float | None,
    noise_std: float | None,
    delta: float,
    epsilon: float | None,
    denominator: float | None,
) -> Claim | None:
    """The claim of the options; None: that of the experiment."""
    from fedrec.errors import ExperimentError
    from simulations.attacks.claims import Claim

    if (clip is None) != (noise_std is None):
        raise ExperimentError(
            "half a claim", expected="--clip and --noise-std, or neither", got="one of them"
        )
    if clip is None or noise_std is None:
        return None
    return Claim(clip, noise_std, delta, epsilon, denominator)


def _print_audit(found: Audit, folder: Path) -> None:
    from rich.console import Console

    console = Console()
    console.print(_scores(found))
    for line in _checks(found):
        console.print(line, highlight=False)
    typer.echo(folder)
    colours = {"PASS": typer.colors.GREEN, "WARN": typer.colors.YELLOW, "FAIL": typer.colors.RED}
    typer.secho(f"{found.verdict}", fg=colours[found.verdict], bold=True)
    for reason in found.reasons():
        typer.secho(f"  {reason}", fg=colours[found.verdict], err=found.verdict == "FAIL")


def _scores(found: Audit) -> Table:
    """A row for each run and observer: bounds, estimate, and the claimed epsilon."""
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column in ("phase", "observer") else "right")
    for run in found.runs:
        for score in run.scores:
            estimate = score.estimate
            shown.add_row(
                str(run.run),
                run.phase,
                score.observer,
                f"{score.one_run.epsilon:.3f}",
                f"{score.gdp:.3f}",
                f"{estimate.epsilon:.3f}",
                f"{estimate.low:.3f} to {estimate.high:.3f}",
                f"{score.upper:.3f}",
            )
    return shown


def _checks(found: Audit) -> Iterator[str]:
    """A line for each check of each run."""
    for run in found.runs:
        for check in run.checks:
            state = "ok   " if check.passed else "WRONG"
            yield (
                f"{state} {run.label} {check.name}: {check.measured:.4g}, claimed"
                f" {check.claimed:.4g} (p = {check.probability:.2g})"
            )
