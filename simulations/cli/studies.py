# SPDX-License-Identifier: Apache-2.0
"""Commands that run many experiments: `fedrec sweep` and `fedrec reproduce`."""

import math
from collections import defaultdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import pandas as pd
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Law
from fedrec.runs.ids import runs_directory, stamp
from simulations.cli import options
from simulations.cli.options import Named, interruptible, wide_console
from simulations.reproduce.recorded import (
    NOT_HERE,
    UNRECORDED,
    command,
    find,
    key,
    published,
    recorded,
    studies,
)
from simulations.studies import tables
from simulations.studies.declaration import Study
from simulations.studies.runs import folder_of, run_study, selected
from simulations.studies.search import SweepPlan, grid, plan_of
from simulations.studies.search import overrides as texts_of
from simulations.studies.sweep import CHOSEN, SweepFolder, SweepResult, chosen_file
from simulations.studies.sweep import sweep as run_sweep
from simulations.studies.tables import cells_of, duration

# `fedrec sweep`: run one experiment with many settings and seeds.

_SHOWN = 20  # settings in the table on the terminal


def sweep(
    experiment: Named,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", "-v", help="KEY=[VALUE, ...] or KEY={low=.., high=.., log=true}."),
    ] = None,
    overrides: Annotated[
        list[str] | None, options.overrides("Override a key in all runs, such as rounds=50.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds per setting.")] = 1,
    trials: Annotated[
        int | None, typer.Option(help="Number of random settings to try; default: the full grid.")
    ] = None,
    optimise: Annotated[
        list[str] | None, typer.Option(help="Metric to optimise with Optuna; two: a Pareto front.")
    ] = None,
    choose: Annotated[
        list[str] | None, typer.Option(help="Metric that selects the best of the tried settings.")
    ] = None,
    private_choice: Annotated[
        Law | None,
        typer.Option(
            help="Select privately, as the best of a random number of trials with mean --trials."
        ),
    ] = None,
    workers: Annotated[int, options.workers("runs")] = 1,
    output: Annotated[
        Path | None, options.output("Folder of the sweep: new, or of the same sweep.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Validate and print the settings without running them.")
    ] = False,
    quiet: Annotated[bool, options.quiet("Print only the folder of the sweep.")] = False,
) -> None:
    """Run an experiment with many settings and seeds, each in its own run folder. Without --trials,
    all combinations of the --vary values are run. The same command, or `fedrec resume FOLDER`,
    continues an interrupted sweep and repeats failed runs. Settings are selected on validation
    rows, never on test rows of the same seed.
    """
    plan = plan_of(
        experiment,
        overrides or [],
        vary or [],
        seeds=seeds,
        trials=trials,
        optimise=optimise or [],
        choose=choose or [],
        private=private_choice,
    )
    if dry_run:
        _print_plan(plan)
        return
    name = plan.experiment.get("name", "sweep")
    _run(plan, output or runs_directory() / f"sweep-{name}-{stamp()}", quiet, workers)


def resume(folder: Path, quiet: bool) -> None:
    """Continue an interrupted sweep, one run at a time."""
    _run(SweepFolder(folder).plan, folder, quiet)


def _run(plan: SweepPlan, folder: Path, quiet: bool, workers: int = 1) -> None:
    _print_cost(plan)
    with interruptible(f"continue with: fedrec resume {quote(str(folder))}"):
        result = run_sweep(plan, folder, workers=workers, quiet=quiet)
    if not quiet:
        _print_result(result)
        compared = "" if plan.private else f"\n  fedrec compare {folder}"
        typer.echo(f"Next:{compared}\n  fedrec report {folder}", err=True)
    typer.echo(result.folder)
    if result.failures:
        raise typer.Exit(1)


def _print_cost(plan: SweepPlan) -> None:
    """Print the cost of a private choice before the first run."""
    for line in plan.cost.lines() if plan.cost else ():
        typer.echo(line, err=True)


def _print_plan(plan: SweepPlan) -> None:
    _print_cost(plan)
    if plan.private is not None:
        typer.echo(f"{len(grid(plan.space))} settings, a random number of trials")
        return
    runs = plan.trials * len(plan.seeds)
    typer.echo(f"{plan.trials} settings ({plan.method}), {len(plan.seeds)} seeds: {runs} runs")
    for point in grid(plan.space) if plan.method == "grid" else ():
        typer.echo("  " + (" ".join(texts_of(point)) or "unchanged experiment"))


def _print_result(result: SweepResult) -> None:
    console = Console()
    cost = result.plan.cost
    if cost is None:
        console.print(_settings_table(result))
        hidden = len(result.settings) - _SHOWN
        if hidden > 0:
            console.print(f"{hidden} more settings in settings.csv", highlight=False)
    for name, text in result.failures.items():
        console.print(f"{name} failed: {text}", highlight=False, markup=False)
    for line in (*_choice(result), *(cost.lines() if cost else result.total)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    counts = f"{len(result.settings)} settings, {len(result.runs)} runs. "
    console.print(f"{'' if cost else counts}Folder of the sweep:")


def _choice(result: SweepResult) -> list[str]:
    """Lines about the selected setting, and the command that evaluates it."""
    aims = " and ".join(result.plan.aims)
    if not aims:
        return []
    if not result.chosen:
        return [f"No setting was selected, because none has {aims} for all seeds."]
    if (cost := result.plan.cost) is not None:  # the number of the trial is not published
        setting = " ".join(texts_of(SweepFolder(result.folder).trials()[result.chosen[0] - 1]))
        folder = result.folder / CHOSEN
        return [
            f"Selected by {aims}: {setting}. Publish only {folder}; all other files of the sweep"
            " are private.",
            f"Another run with this setting, such as one on the test rows, costs epsilon"
            f" {cost.once:.4g} in addition:",
            f"  fedrec run {folder / 'experiment.toml'} --set evaluation.held-out=test",
        ]
    front = ", ".join(map(str, result.chosen))
    line = f"Selected by {aims}: setting {front}. To evaluate it once on the test rows:"
    if len(result.chosen) > 1:
        line = f"Pareto front of {aims}: settings {front}. To evaluate them on the test rows:"
    return [line, *(f"  fedrec run {chosen_file(result.folder, trial)}" for trial in result.chosen)]


def _settings_table(result: SweepResult) -> Table:
    """Table of the settings, ordered by the first aim if there is one."""
    settings = result.settings
    metrics = _metrics(result)
    keys = list(result.plan.space)
    short = [key.rpartition(".")[2] for key in keys]
    heads = short if len({*short, *metrics}) == len(short) + len(metrics) else keys
    spread = settings[[f"{metric} sd" for metric in metrics]].notna().to_numpy().any()
    caption = "+-: standard deviation over seeds" if spread else None
    table = Table("setting", *heads, "runs", caption=caption, caption_justify="left")
    for metric in metrics:
        table.add_column(metric, justify="right")
    aims = [aim for aim in result.plan.aims[:1] if aim in settings]
    if aims:
        settings = settings.sort_values(aims, ascending=result.plan.lower_is_better(aims[0]))
    for number, row in settings.head(_SHOWN).to_dict("index").items():
        cells = [str(row[key]) for key in keys]
        values = [_cell(float(row[metric]), float(row[f"{metric} sd"])) for metric in metrics]
        style = "bold" if number in result.chosen else None
        setting = f"{number} [leak]" if row.get("leak") else str(number)
        table.add_row(escape(setting), *cells, str(row["runs"]), *values, style=style)
    return table


def _metrics(result: SweepResult) -> list[str]:
    """Metrics of the table; if all systems are centralised, those of each system."""
    names = list(result.settings.columns)
    preferred = [*result.plan.aims, "hits@10", "ndcg@10", "rmse", "mae", "epsilon"]
    shown = [name for name in dict.fromkeys(preferred) if name in names]
    if "epsilon" in shown and set(result.settings["epsilon"]) <= {math.inf}:
        shown.remove("epsilon")
    return shown or [name for name in names if name.endswith((" hits@10", " rmse"))]


def _cell(value: float, spread: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if math.isnan(spread) else f"{value:.4f} +- {spread:.4f}"


# `fedrec reproduce`: compare a paper's tables and figures with our results.

_FILE_WIDTH = 120  # width in characters of a table in a file or a pipe


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="Paper, see --list, or a TOML file of studies.")
    ] = None,
    item: Annotated[
        str | None, typer.Argument(help="Table or figure, such as table2; default: all.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List tables and figures, our numbers and commands.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="Do a test run with few rounds on synthetic data.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds; default: that of the study.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Run only tasks of this name, or pattern such as 'mf-*'.")
    ] = "",
    workers: Annotated[int, options.workers("tasks")] = 1,
    output: Annotated[
        Path | None, options.output("Folder of the study or studies: new, or of the same.")
    ] = None,
) -> None:
    """Run the experiments of a paper's table or figure, and print the paper's and our numbers with
    intervals. The expected duration is printed first. The same command continues an interrupted
    study. Declare your own studies in a TOML file.
    """
    if listed or paper is None:
        listed_studies = find(paper, item) if paper else list(studies())
        _print_list(listed_studies, paper if paper and paper.endswith(".toml") else None)
        if item is not None:
            (study,) = listed_studies
            typer.echo(f"tasks: {', '.join(task.name for task in study.tasks)}")
        return
    if only and item is None:
        fix = f"name one of fedrec reproduce --list {paper}"
        raise ExperimentError("--only needs a table or figure", fix=fix)
    failures: dict[str, str] = {}
    wanted = find(paper, item)
    for study in wanted:
        name = f"{study.paper}-{study.item}{'-quick' if quick else ''}"
        path = output or runs_directory() / "reproduce" / name
        if output is not None and len(wanted) > 1:
            path = output / study.item
        count = seeds or (1 if quick else study.seeds)
        failures |= _reproduce(study, path, count, quick, only, workers)
    for name, text in failures.items():
        typer.secho(f"{name} failed: {text}", err=True)
    if failures:
        raise typer.Exit(1)


def _reproduce(
    study: Study, path: Path, seeds: int, quick: bool, only: str, workers: int
) -> dict[str, str]:
    """Run and print a study, or some of its tasks, and return the errors of failed tasks."""
    folder = folder_of(study, path, quick=quick)
    jobs = selected(study.jobs(folder, seeds, quick=quick), only)
    with interruptible("repeat the command to continue"):
        failures = run_study(folder, jobs, workers=workers, name=study.name)
    printed = published(study.paper, study.item, study.published)
    _print_tables(study, *tables.write(study, folder, jobs, printed, quick=quick))
    typer.echo(folder)
    return failures


def _print_tables(study: Study, table: pd.DataFrame, notes: list[str]) -> None:
    several = len(set(table["dataset"])) > 1
    named = ("dataset", "model", "metric") if several else ("model", "metric")
    shown = Table(*named, title=f"{study.name}: {study.title}", title_justify="left")
    for column in ("published", "ours", "95 % interval"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table.to_dict("records"):
        shown.add_row(*cells_of(row)[0 if several else 1 :])
    console = wide_console(_FILE_WIDTH)
    console.print(shown)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _print_list(studies: list[Study], file: str | None) -> None:
    """Print the title of each table and figure, one of our numbers (unknown for a file of other
    studies), and the command that reproduces it."""
    numbers = recorded() if file is None else {}
    seconds: dict[str, float] = defaultdict(float)
    for study in studies:
        typer.echo(f"{study.paper:12} {study.item:15} {study.title}")
        entry = numbers.get(key(study))
        seeds = study.seeds
        if entry is not None:
            typer.echo(f"{'':28} {entry.headline} ({entry.date}, fedrec {entry.fedrec})")
            seeds = entry.seeds
        elif file is None:
            why = UNRECORDED.get(study.name, "not measured with this version")
            typer.echo(f"{'':28} no numbers: {why}")
        seconds[study.paper] += study.seconds(study.seeds)
        words = command(study, seeds) if file is None else f"fedrec reproduce {file} {study.item}"
        counted = f"{seeds} seed{'s' if seeds > 1 else ''}"
        typer.echo(f"{'':28} {words} ({counted}, about {duration(study.seconds(seeds))})")
    for name, why in NOT_HERE.items():
        if name.partition(" ")[0] in seconds and file is None:
            paper, item = name.split()
            typer.echo(f"{paper:12} {item:15} not reproduced: {why}")
    for paper, total in seconds.items():
        words = f"fedrec reproduce {file or paper}"
        typer.echo(f"{words} reproduces all of these in about {duration(total)} on two cores")
