# SPDX-License-Identifier: Apache-2.0
"""`fedrec attack membership`, `fedrec attack lira` and `fedrec audit`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedrec.attacks.success import Success
    from fedrec.experiment.schema import Experiment

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str,
    typer.Argument(metavar="EXPERIMENT", help="A TOML file, or the name of a shipped experiment."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override a key: --set rounds=20")
]
Engine = Annotated[str | None, typer.Option(help="serial or ray.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder of the runs; finished runs in it are reused."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Claimed epsilon of the attacked system, to print the bounds that it implies."
    ),
]
Delta = Annotated[float, typer.Option(help="Delta of the claimed epsilon.")]


@app.command(short_help="Run PrivRec's membership attack.")
def membership(
    experiment: Name,
    overrides: Overrides = None,
    engine: Engine = None,
    shadow_users: Annotated[
        int, typer.Option(help="Number of users whose data the attacker has.")
    ] = 1000,
    used: Annotated[
        float, typer.Option(help="Share of these users that train the shadow system.")
    ] = 0.8,
    members: Annotated[
        float, typer.Option(help="Share of the other users that train the target system.")
    ] = 0.5,
    encoding: Annotated[
        str, typer.Option(help="Encoding of a list: multi-hot, pooled or both.")
    ] = "both",
    lists: Annotated[
        str,
        typer.Option(help="Lists of the shared model, or after fine-tuning: shared, fine-tuned."),
    ] = "shared",
    exclude_known: Annotated[
        bool, typer.Option(help="Exclude a user's known items from lists.")
    ] = False,
    trees: Annotated[int, typer.Option(help="Number of trees in the random forest.")] = 100,
    balanced: Annotated[
        bool, typer.Option(help="Give members and non-members among the shadow users equal weight.")
    ] = False,
    judged: Annotated[
        int,
        typer.Option(
            min=0,
            help="Test users for evaluating the target's recommendations; 0: all (slow).",
        ),
    ] = 200,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run PrivRec's membership attack: shadow system, top-10 lists, random forest."""
    from simulations.attacks.membership import MembershipOptions, attack_membership

    one_of("encoding", encoding, ("multi-hot", "pooled", "both"))
    one_of("lists", lists, ("shared", "fine-tuned"))
    settings: dict[str, Any] = {
        "encoding": encoding,
        "lists": lists,
        "exclude_known": exclude_known,
        "trees": trees,
    }
    settings |= {"balanced": balanced, "judged": judged or None}
    options = MembershipOptions(shadow_users=shadow_users, used=used, members=members, **settings)
    loaded, folder = prepare(experiment, overrides, engine, output, "membership")
    attack = watched(
        quiet or as_json, lambda calls: attack_membership(loaded, options, folder, calls)
    )
    report_attack(attack.table(), attack.success, (epsilon, delta), folder, as_json)


@app.command(short_help="Run the likelihood-ratio attack LiRA.")
def lira(
    experiment: Name,
    overrides: Overrides = None,
    engine: Engine = None,
    shadows: Annotated[int, typer.Option(help="Number of shadow systems (even).")] = 16,
    mode: Annotated[str, typer.Option(help="Attack mode: online or offline.")] = "online",
    variance: Annotated[
        str, typer.Option(help="Variance pooled over users or per user: global, user.")
    ] = "global",
    signal: Annotated[
        str, typer.Option(help="Signal: positives or contrast, see docs/attacks.md.")
    ] = "contrast",
    fine_tune: Annotated[
        bool, typer.Option(help="Fine-tune on the user's data before measuring the signal.")
    ] = False,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the likelihood-ratio attack (LiRA, Carlini et al. 2022) with shadow federations."""
    from simulations.attacks.lira import LiraOptions, attack_lira

    one_of("mode", mode, ("online", "offline"))
    one_of("variance", variance, ("global", "user"))
    one_of("signal", signal, ("positives", "contrast"))
    settings: dict[str, Any] = {
        "mode": mode,
        "variance": variance,
        "signal": signal,
        "fine_tune": fine_tune,
    }
    options = LiraOptions(shadows=shadows, **settings)
    loaded, folder = prepare(experiment, overrides, engine, output, "lira")
    attack = watched(quiet or as_json, lambda calls: attack_lira(loaded, options, folder, calls))
    report_attack(attack.table(), attack.success, (epsilon, delta), folder, as_json)


def prepare(
    name: str, overrides: list[str] | None, engine: str | None, output: Path | None, what: str
) -> tuple[Experiment, Path]:
    """The experiment and the folder of its runs."""
    from fedrec.experiment.loading import load
    from fedrec.runs.directory import default_folder

    loaded = load(name, [*(overrides or []), *([f"engine.name={engine}"] if engine else [])])
    default = default_folder(loaded)
    return loaded, output or default.with_name(f"{what}-{default.name}")


def watched(quiet: bool, work: Callable[[list], Any]) -> Any:
    """Run some work with the callbacks that show its progress."""
    from server.callbacks.progress import Progress

    progress = Progress()
    try:
        return work([] if quiet else [progress])
    finally:
        progress.close()


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is not among the known ones."""
    from fedrec.config import did_you_mean
    from fedrec.errors import ExperimentError

    if value not in known:
        raise ExperimentError(
            f"wrong value for --{option}",
            expected=" or ".join(known),
            got=value,
            fix=did_you_mean(value, known),
        )


def report_attack(
    table: dict[str, Any],
    success: Success,
    claim: tuple[float | None, float],
    folder: Path,
    as_json: bool,
) -> None:
    """Write the result of a membership attack and print it."""
    epsilon, delta = claim
    ceilings = {} if epsilon is None else success.ceilings(epsilon, delta)
    text = save({**table, "ceilings": ceilings}, folder / "attack.json")
    if as_json:
        typer.echo(text)
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in (
        "figure",
        "value",
        "95 % interval",
        "chance",
        *(["DP ceiling"] if ceilings else []),
    ):
        shown.add_column(column, justify="left" if column == "figure" else "right")
    rows = {
        "accuracy": (success.accuracy, success.majority, None),
        "balanced accuracy": (success.balanced_accuracy, 0.5, "balanced_accuracy"),
        "AUC": (success.auc, 0.5, None),
        f"members found at {success.wanted:.0%} false alarms": (
            success.found,
            success.false_alarms,
            "found",
        ),
    }
    for name, (figure, chance, key) in rows.items():
        ceiling = [f"{ceilings[key]:.3f}" if key in ceilings else "-"] if ceilings else []
        shown.add_row(
            name,
            f"{figure.value:.3f}",
            f"{figure.low:.3f} to {figure.high:.3f}",
            f"{chance:.3f}",
            *ceiling,
        )
    console = Console()
    console.print(shown)
    console.print(f"{success.members} members, {success.others} others. Folder of the runs:")
    typer.echo(folder)


def save(table: dict[str, Any], file: Path) -> str:
    """Write a report, and return it as text."""
    from fedrec.runtime.atomic_files import write_atomically

    text = json.dumps(_finite(table), indent=2)
    write_atomically(file, text + "\n")
    return text


def _finite(value: Any) -> Any:
    """The same with infinities as text, because JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
