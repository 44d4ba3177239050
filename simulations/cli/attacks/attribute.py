# SPDX-License-Identifier: Apache-2.0
"""`fedrec attack attribute`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli.attacks import membership

if TYPE_CHECKING:
    from simulations.attacks.attribute import AttributeAttack


def attribute(
    experiment: membership.Name,
    name: Annotated[str, typer.Option("--attribute", help="User feature to infer.")] = "gender",
    source: Annotated[
        str, typer.Option(help="What the attacker sees: profiles, recommendations or updates.")
    ] = "profiles",
    attacker: Annotated[str, typer.Option(help="Classifier: neural or logistic.")] = "neural",
    folds: Annotated[
        int, typer.Option(min=2, help="Number of cross-validation folds over users.")
    ] = 5,
    lists: Annotated[
        str,
        typer.Option(help="Lists of the shared model, or after fine-tuning: shared, fine-tuned."),
    ] = "fine-tuned",
    include_known: Annotated[
        bool, typer.Option(help="Whether lists may contain a user's known items.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of parameters to ignore, such as 'user.*'; may repeat."),
    ] = None,
    overrides: membership.Overrides = None,
    engine: membership.Engine = None,
    output: membership.Output = None,
    as_json: membership.AsJson = False,
    quiet: membership.Quiet = False,
) -> None:
    """Infer an attribute of users from their profiles, recommendations or updates."""
    from simulations.attacks.attribute import AttributeOptions, attack_attribute

    membership.one_of("source", source, ("profiles", "recommendations", "updates"))
    membership.one_of("attacker", attacker, ("neural", "logistic"))
    membership.one_of("lists", lists, ("shared", "fine-tuned"))
    settings: dict[str, Any] = {"source": source, "attacker": attacker, "lists": lists}
    options = AttributeOptions(
        name, folds=folds, exclude_known=not include_known, without=tuple(without or ()), **settings
    )
    loaded, folder = membership.prepare(experiment, overrides, engine, output, "attribute")
    found = membership.watched(
        quiet or as_json, lambda calls: attack_attribute(loaded, options, folder, calls)
    )
    text = membership.save(found.table(), folder / "attack.json")
    typer.echo(text) if as_json else _print(found, folder)


def _print(found: AttributeAttack, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    success = found.success
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("figure", "value", "95 % interval", "chance"):
        shown.add_column(column, justify="left" if column == "figure" else "right")
    rows = {
        "balanced accuracy": (success.balanced_accuracy, success.chance),
        "accuracy": (success.accuracy, success.majority),
    }
    for name, (figure, chance) in rows.items():
        shown.add_row(
            name, f"{figure.value:.3f}", f"{figure.low:.3f} to {figure.high:.3f}", f"{chance:.3f}"
        )
    if success.auc is not None:
        shown.add_row("AUC", f"{success.auc:.3f}", "-", "0.500")
    console = Console()
    console.print(shown)
    sizes = ", ".join(
        f"{n} {label}" for n, label in zip(success.classes, found.categories, strict=True)
    )
    spread = f"balanced accuracy in the folds {min(success.folds):.3f} to {max(success.folds):.3f}"
    console.print(f"{success.users} users ({sizes}); {spread}. Folder:", highlight=False)
    typer.echo(folder)
