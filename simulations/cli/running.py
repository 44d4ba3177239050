# SPDX-License-Identifier: Apache-2.0
"""`fedrec run` and `fedrec resume`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedrec.runs import Result


def _shipped(incomplete: str) -> list[str]:
    from fedrec.experiment import shipped_experiments

    return [name for name in shipped_experiments() if name.startswith(incomplete)]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the run folder.")]


def run(
    experiment: Annotated[
        str, typer.Argument(help="A TOML file, or the name of a shipped experiment.", autocompletion=_shipped)
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override a key: --set strategy.server-lr=0.5")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="serial, ray or flower.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes that host the clients.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda:N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the experiment.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run folder, new or empty.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment from the beginning."""
    from fedrec.experiment import load
    from fedrec.runs import default_folder

    flags = {
        "engine.name": engine,
        "engine.nodes": nodes,
        "engine.device": device,
        "engine.ray-address": ray_address,
        "seed": seed,
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    loaded = load(experiment, [*(overrides or []), *given])
    folder = output or default_folder(loaded)
    from simulations import runner

    _finish(folder, quiet, lambda callbacks: runner.run(loaded, output=folder, callbacks=callbacks))


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, as `fedrec run` printed it.")], quiet: Quiet = False
) -> None:
    """Continue a run from its newest checkpoint."""
    from simulations import runner

    _finish(folder, quiet, lambda callbacks: runner.resume(folder, callbacks=callbacks))


def _finish(folder: Path, quiet: bool, work: Callable[[list], Result]) -> None:
    """Do the work, and print its table; Ctrl-C leaves a run that can be resumed, and says how."""
    from server.callbacks.progress import Progress

    progress = Progress()
    try:
        result = work([] if quiet else [progress])
    except KeyboardInterrupt:
        progress.close()
        typer.secho(f"\ninterrupted; continue with: fedrec resume {folder}", err=True)
        raise typer.Exit(130) from None
    finally:
        progress.close()
    if not quiet:
        _print_table(result)
    typer.echo(result.folder)


def _print_table(result: Result) -> None:
    from rich.console import Console

    from fedrec.report.table import comparison_table

    rows = {result.experiment.name: result.metrics} if result.experiment.federated else {}
    if result.before_fine_tuning:
        rows["  before fine-tuning"] = result.before_fine_tuning
    rows |= result.baselines
    known = next(iter(rows.values()), {})
    shown = [name for name in known if name.startswith(("hits@", "mae", "rmse", "reconstruction-"))]
    shown += [name for name in ("ndcg@10",) if name in known]
    shown += [name for name in ("nominal-epsilon", "epsilon") if any(name in row for row in result.baselines.values())]
    console = Console()
    console.print(comparison_table(rows, shown))
    for line in result.privacy:
        console.print(line, highlight=False)
    rounds = f", {len(result.rounds)} rounds" if result.experiment.federated else ""
    console.print(f"{len(result.users)} users{rounds}. Run folder:")
