# SPDX-License-Identifier: Apache-2.0
"""Commands that run experiments: `fedrec run`, `resume` and `demo`."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.report.comparison import epsilon_of, system_rows
from fedrec.report.inputs import inputs_line, system_inputs
from fedrec.report.page.sections import report
from fedrec.report.privacy_total import shown_together
from fedrec.report.summary import result_lines, summary_table
from fedrec.runs.folder import Result
from fedrec.runs.ids import default_folder, runs_directory, stamp
from fedrec.runtime.files import write_atomically
from server.callbacks import Progress
from simulations import runner
from simulations.cli import options, studies
from simulations.cli.options import Engine, Quiet, RunOutput, interruptible, with_options
from simulations.own_table import OwnTable

Column = Annotated[str | None, typer.Option(help="Name of the column, if it is not recognised.")]
Unrated = Annotated[
    bool, typer.Option("--no-rating", help="The table has no ratings: every row counts as liked.")
]
Header = Annotated[
    bool | None,
    typer.Option(help="Whether the first line has names, else 1, 2 and so on. Default: detected."),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Target epsilon of user-level differential privacy; with ratings add --set"
        " positive-above=... or --no-rating."
    ),
]
System = Annotated[
    str | None,
    typer.Option(help="linear, als or popularity; default: the best on validation users."),
]
TimeFormat = Annotated[
    str | None, typer.Option(help="Form of the dates, such as '%m/%d/%Y'. Default: ISO or dotted.")
]
Vectors = Annotated[
    list[Path] | None,
    typer.Option(help="File of dense vectors of the items: X.npy beside X.txt; may repeat."),
]


def run(
    experiment: Annotated[
        str | None, typer.Argument(help="A TOML file, or the name of a shipped experiment.")
    ] = None,
    overrides: Annotated[
        list[str] | None, options.overrides("Override a key, such as strategy.server-lr=0.5.")
    ] = None,
    engine: Engine = None,
    device: Annotated[
        str | None, typer.Option(help="Device: cpu, cuda, cuda:N, or auto (a GPU if there is one).")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Seed of the run, as --set seed=1.")] = None,
    output: RunOutput = None,
    data: Annotated[
        Path | None, typer.Option(help="Your own CSV, Parquet or JSON file of interactions.")
    ] = None,
    user: Column = None,
    item: Column = None,
    rating: Column = None,
    time: Column = None,
    time_format: TimeFormat = None,
    no_rating: Unrated = False,
    header: Header = None,
    epsilon: Epsilon = None,
    system: System = None,
    item_vectors: Vectors = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment; or, with --data, train a federated recommender on your own table, and
    compare it with popularity and centralised EASE."""
    options_given = {"engine.name": engine, "engine.device": device, "seed": seed}
    settings = with_options(overrides, options_given)
    roles = {"user": user, "item": item, "rating": rating, "time": time}
    columns = {role: name for role, name in roles.items() if name is not None}
    vectors = tuple(item_vectors or ())
    table = OwnTable(columns, no_rating, time_format, epsilon, system, vectors, header)
    if data is not None and experiment is None:
        wanted = table.experiment(data, settings, quiet)
    elif experiment is not None and data is None and table == OwnTable():
        wanted = load(experiment, settings)
    else:
        raise ExperimentError(
            "give either an experiment or --data, not both",
            expected="an experiment, or --data TABLE (with --user, --item, --rating, --time,"
            " --time-format, --header, --system, --epsilon, --item-vectors)",
            got="both, or table options without --data" if experiment or data else "neither",
            fix="fedrec run privrec-synthetic (for a private one, --set privacy.epsilon=5), or"
            " fedrec run --data ratings.csv",
        )
    folder = output or default_folder(wanted)
    _watched(
        folder, quiet, lambda callbacks: runner.run(wanted, output=folder, callbacks=callbacks)
    )


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder, or folder of a sweep.")],
    overrides: Annotated[
        list[str] | None, options.overrides("Change a key, such as rounds=200 for more rounds.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its newest checkpoint, or the unfinished runs of a sweep."""
    if (folder / "sweep.json").is_file():
        studies.resume(folder, quiet)
        return
    _watched(
        folder, quiet, lambda callbacks: runner.resume(folder, overrides or [], callbacks=callbacks)
    )


# `fedrec demo`: all runs have the same synthetic users and test users, and work offline.

_METRIC = "hits@10"


_ROWS = (
    ("popularity", "linear-synthetic", "popularity", "one list for all users"),
    ("PrivRec", "privrec-synthetic", None, "REPTILE, adapts on device"),
    ("PrivRec, two stages", "privrec-two-stage-synthetic", None, "after self-supervision"),
    ("linear", "linear-synthetic", None, "two sums over devices"),
    ("EASE, centralised", "linear-synthetic", "ease", "the same with central data"),
    ("private popularity", "linear-private-synthetic", "dp-popularity", "noisy counts"),
    ("DP-PrivRec", "dp-privrec-synthetic", None, "two stages under noise"),
    ("linear, private", "linear-private-synthetic", None, "two noisy sums"),
)
"""Of each system its name in the table, the shipped experiment that has it, the label of the
baseline (None: the federated system), and a description."""


def demo(
    output: Annotated[Path | None, options.output("Folder of the runs and the report.")] = None,
) -> None:
    """Train PrivRec on Ray in one stage, in two stages and with differential privacy, and linear
    systems and popularity, on synthetic data; print a table and write a report. Works offline."""
    folder = output or runs_directory() / f"demo-{stamp()}"
    results: dict[str, Result] = {}
    for name in dict.fromkeys(experiment for _, experiment, _, _ in _ROWS):
        experiment = load(name)
        if experiment.engine.name == "ray":  # to show it: one node is faster for such short runs
            experiment = load(name, ["engine.nodes=2"])
        with closing(Progress()) as progress:
            results[name] = runner.run(experiment, output=folder / name, callbacks=[progress])
    page = folder / "report.html"
    write_atomically(page, report(list(results.values())))
    _print_demo(results)
    typer.echo(f"report: {page}")


def _print_demo(results: Mapping[str, Result]) -> None:
    """Print the table of the results by experiment."""
    table = Table("system", _METRIC, "epsilon", "description")
    inputs = {}
    for system, experiment, baseline, what in _ROWS:
        result = results[experiment]
        label = baseline or result.experiment.name
        inputs[system] = system_inputs(result).get(label)
        epsilon = epsilon_of(result, label)
        spent = f"{epsilon:.2f}" if epsilon is not None and math.isfinite(epsilon) else "-"
        table.add_row(system, f"{system_rows(result)[label][_METRIC]:.3f}", spent, what)
    console = Console()
    console.print(table)
    every = list(results.values())
    private = next(result for result in every if result.privacy)
    for line in [
        f"The same {len(every[0].users)} test users, seed {every[0].experiment.seed}.",
        inputs_line(inputs),
        *private.privacy[:1],
        *shown_together([result.folder for result in every]),
    ]:
        console.print(line, highlight=False)


# Progress, interruptions and results of a run.


def _watched(folder: Path, quiet: bool, work: Callable[[list], Result]) -> None:
    """Run the work and print the results; after Ctrl-C, print the command that resumes the run."""
    resume = f"continue with: fedrec resume {quote(str(folder))}"
    with interruptible(resume), closing(Progress()) as progress:
        result = work([] if quiet else [progress])
    if not quiet:
        print_table(result)
        _print_next(result)
        typer.echo("Run folder:", err=True)
    typer.echo(result.folder)


def print_table(result: Result) -> None:
    """Print the results of a finished run, and its privacy cost."""
    console = Console()
    console.print(summary_table(result))
    for line in result_lines(result):
        # without wrapping, so that a private run has few lines
        console.print(line, highlight=False, soft_wrap=result.experiment.privacy is not None)


def _print_next(result: Result) -> None:
    """Print suggested next commands after a finished run to standard error."""
    experiment = result.experiment
    run = quote(str(result.folder))
    typer.echo("Next:", err=True)
    typer.echo(f"  fedrec report {run} -o report.html", err=True)
    typer.echo(f"  fedrec compare {run} OTHER-RUN", err=True)
    if experiment.federated and experiment.dataset.name == "table":
        typer.echo(f"  fedrec recommend {run} --top 20 -o lists.csv", err=True)
