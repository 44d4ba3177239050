# SPDX-License-Identifier: Apache-2.0
"""`fedrec sweep`: run one experiment with many settings and seeds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli import options
from simulations.cli.finishing import interruptible
from simulations.cli.options import Named

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from simulations.studies.private import ChoiceCost
    from simulations.studies.search import SweepPlan
    from simulations.studies.sweep import SweepResult


_SHOWN = 20  # settings in the table on the terminal


Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        "-v",
        help="KEY=[VALUE, ...] or KEY={low=0.01, high=1.0, log=true}; may repeat.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    options.overrides("Override a key in all runs, such as rounds=50; may repeat."),
]
Seeds = Annotated[int, typer.Option(help="Number of seeds per setting.")]
Trials = Annotated[
    int | None, typer.Option(help="Number of random settings to try; default: the full grid.")
]
Optimise = Annotated[
    list[str] | None,
    typer.Option(
        help="Metric to optimise with Optuna; two make a Pareto front: hits@10 and epsilon."
    ),
]
Choose = Annotated[
    list[str] | None,
    typer.Option(
        help="Metric to select the best setting of the grid, or of the random settings, by."
    ),
]
Private = Annotated[
    str | None,
    typer.Option(
        "--private-choice",
        help="Choose one setting privately, as the best of a random number of trials of mean "
        "--trials: geometric, logarithmic or poisson.",
    ),
]
ScoreNoise = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="With --private-choice, where validation users train: standard deviation of the "
        "noise on a trial's score.",
    ),
]
Workers = Annotated[int, options.workers("runs")]
RayAddress = Annotated[str | None, typer.Option(help="Address of a running Ray cluster.")]
Output = Annotated[Path | None, options.output("Folder of the sweep: new, or of the same sweep.")]
RetryFailed = Annotated[bool, typer.Option(help="Repeat runs that failed.")]
DryRun = Annotated[bool, typer.Option(help="Validate and print the settings without running them.")]
Quiet = Annotated[bool, options.quiet("Print only the folder of the sweep.")]


def sweep(
    experiment: Named,
    vary: Vary = None,
    overrides: Overrides = None,
    seeds: Seeds = 1,
    trials: Trials = None,
    optimise: Optimise = None,
    choose: Choose = None,
    private_choice: Private = None,
    score_noise: ScoreNoise = 0.0,
    workers: Workers = 1,
    ray_address: RayAddress = None,
    output: Output = None,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with many settings and seeds, each in its own run folder. Without --trials,
    all combinations of the --vary values are run. The same command, or `fedrec resume FOLDER`,
    continues an interrupted sweep. Settings are selected on validation rows, never on test
    rows of the same seed.
    """
    from simulations.studies.search import plan_of
    from simulations.studies.sweep import sweep as run_sweep

    plan = plan_of(
        experiment,
        overrides or [],
        vary or [],
        seeds=seeds,
        trials=trials,
        optimise=optimise or [],
        choose=choose or [],
        private=private_choice,  # type: ignore[arg-type]  # checked there
        score_noise=score_noise,
    )
    cost = _private_lines(plan)
    for line in cost:
        typer.echo(line, err=True)
    if dry_run:
        _print_plan(plan)
        return
    folder = output or _default_folder(str(plan.experiment.get("name", "sweep")))
    run = functools.partial(run_sweep, plan, folder, workers=workers, ray_address=ray_address)
    _finish(folder, quiet, cost, lambda: run(retry_failed=retry_failed, quiet=quiet))


def resume(folder: Path, quiet: bool) -> None:
    """Continue an interrupted sweep, one run at a time."""
    from simulations.studies.sweep import SweepFolder
    from simulations.studies.sweep import sweep as run_sweep

    plan = SweepFolder(folder).plan
    _finish(folder, quiet, _private_lines(plan), lambda: run_sweep(plan, folder, quiet=quiet))


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / "sweep.json").is_file()


def _finish(
    folder: Path, quiet: bool, cost: Sequence[str], work: Callable[[], SweepResult]
) -> None:
    with interruptible(f"continue with: fedrec resume {quote(str(folder))}"):
        result = work()
    if not quiet:
        _print_result(result, cost)
        compared = "" if cost else f"\n  fedrec compare {folder}"
        typer.echo(f"Next:{compared}\n  fedrec report {folder}", err=True)
    typer.echo(result.folder)
    if result.failures:
        raise typer.Exit(1)


def _default_folder(name: str) -> Path:
    from fedrec.runs.ids import runs_directory, stamp

    return runs_directory() / f"sweep-{name}-{stamp()}"


def _private_lines(plan: SweepPlan) -> list[str]:
    """What a private choice costs; nothing for other sweeps."""
    if plan.private is None:
        return []
    from simulations.studies.private import cost_of

    return list(cost_of(plan.experiment, plan.space, plan.private, plan.aims[0]).lines())


def _print_plan(plan: SweepPlan) -> None:
    from simulations.studies.space import grid, overrides

    if plan.private is not None:
        typer.echo(f"{len(grid(plan.space))} settings, a random number of trials")
        return
    runs = plan.trials * len(plan.seeds)
    typer.echo(f"{plan.trials} settings ({plan.method}), {len(plan.seeds)} seeds: {runs} runs")
    for point in grid(plan.space) if plan.method == "grid" else ():
        typer.echo("  " + (" ".join(overrides(point)) or "as the experiment is"))


def _print_result(result: SweepResult, private: Sequence[str]) -> None:
    from rich.console import Console

    console = Console()
    if not private:
        console.print(_table(result))
    hidden = len(result.settings) - _SHOWN
    if hidden > 0 and not private:
        console.print(f"{hidden} more settings in settings.csv", highlight=False)
    for name, text in result.failures.items():
        console.print(f"{name} failed: {text}", highlight=False, markup=False)
    for line in (*_choice(result), *(private or result.total.lines)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    counts = f"{len(result.settings)} settings, {len(result.runs)} runs. "
    console.print(f"{'' if private else counts}Folder of the sweep:")


def _choice(result: SweepResult) -> list[str]:
    """Print the selected setting, and the command that evaluates it."""
    from simulations.studies.sweep import chosen_file

    aims = " and ".join(result.plan.aims)
    if not result.plan.aims:
        return [
            "No setting was selected; the table is in the order of the runs. To select one: "
            "--choose METRIC with --set evaluation.held-out=validation."
        ]
    if not result.chosen:
        return [f"No setting has a value of {aims} for all seeds: none was selected."]
    if result.cost is not None:
        return _published(result, result.cost)
    front = ", ".join(map(str, result.chosen))
    said = f"Selected by {aims}: setting {front}. To evaluate it once on the test rows:"
    if len(result.chosen) > 1:
        said = f"Pareto front of {aims}: settings {front}. To evaluate them on the test rows:"
    return [said, *(f"  fedrec run {chosen_file(result.folder, one)}" for one in result.chosen)]


def _published(result: SweepResult, cost: ChoiceCost) -> list[str]:
    """What a private choice chose, and where it is; the number of the trial is not published."""
    from simulations.studies.private import CHOSEN
    from simulations.studies.space import overrides

    setting = " ".join(overrides(result.point(result.chosen[0])))
    folder = result.folder / CHOSEN
    return [
        f"Selected by {cost.aim}: {setting}. To be published: {folder}; all else in the folder of"
        " the sweep is private.",
        f"Another run with this setting, such as one on the test rows, costs epsilon"
        f" {cost.once:.4g} in addition:",
        f"  fedrec run {folder / 'experiment.toml'} --set evaluation.held-out=test",
    ]


def _table(result: SweepResult) -> Table:
    from rich.markup import escape
    from rich.table import Table

    metrics = _metrics(result)
    spread = any(result.settings[f"{metric} sd"].notna().any() for metric in metrics)
    words = "+-: standard deviation over seeds" if spread else None
    keys = _short(list(result.plan.space), metrics)
    table = Table("setting", *keys, "runs", caption=words, caption_justify="left")
    for metric in metrics:
        table.add_column(metric, justify="right")
    for number, row in _ordered(result).head(_SHOWN).to_dict("index").items():
        cells = [str(row[key]) for key in result.plan.space]
        values = [_cell(row, metric) for metric in metrics]
        style = "bold" if number in result.chosen else None
        setting = f"{number} [leak]" if row.get("leak") else str(number)
        table.add_row(escape(setting), *cells, str(row["runs"]), *values, style=style)
    return table


def _short(keys: list[str], metrics: list[str]) -> list[str]:
    """The last words of keys, if they are unique and differ from the metrics."""
    last = [key.rpartition(".")[2] for key in keys]
    return last if len({*last, *metrics}) == len(last) + len(metrics) else keys


def _ordered(result: SweepResult) -> pd.DataFrame:
    """The settings, by the first aim where there is one."""
    aims = [aim for aim in result.plan.aims[:1] if aim in result.settings.columns]
    if not aims:
        return result.settings
    return result.settings.sort_values(aims, ascending=result.plan.lower_is_better(aims[0]))


def _metrics(result: SweepResult) -> list[str]:
    known = list(result.settings.columns)
    preferred = [*result.plan.aims, "hits@10", "ndcg@10", "rmse", "mae", "epsilon"]
    shown = [name for name in dict.fromkeys(preferred) if name in known]
    if "epsilon" in shown and set(result.settings["epsilon"]) <= {math.inf}:
        shown.remove("epsilon")
    # centralised systems only
    others = [name for name in known if name.endswith((" hits@10", " rmse"))]
    return shown or others


def _cell(row: Mapping[Any, Any], metric: str) -> str:
    value = float(row[metric])
    spread = float(row[f"{metric} sd"])
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if math.isnan(spread) else f"{value:.4f} +- {spread:.4f}"
