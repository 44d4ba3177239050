# SPDX-License-Identifier: Apache-2.0
"""`fedrec attack run`: a membership attack by name, built-in or from a plug-in."""

from __future__ import annotations

from typing import Annotated

import typer

from simulations.cli.attacks import membership


def run(
    name: Annotated[
        str, typer.Argument(metavar="ATTACK", help="Name of the attack; see fedrec list attack.")
    ],
    experiment: membership.Name,
    settings: Annotated[
        list[str] | None, typer.Option("--with", "-w", help="A setting: --with signal=positives")
    ] = None,
    fine_tune: Annotated[
        bool, typer.Option(help="Fine-tune on a user's data before computing its scores.")
    ] = False,
    overrides: membership.Overrides = None,
    engine: membership.Engine = None,
    epsilon: membership.Epsilon = None,
    delta: membership.Delta = 1e-5,
    output: membership.Output = None,
    as_json: membership.AsJson = False,
    quiet: membership.Quiet = False,
) -> None:
    """Train an experiment on half of its users and run a membership attack on it."""
    from fedrec.experiment.overrides import override
    from fedrec.experiment.sections import Section
    from simulations.attacks.named import attack_by_name

    table: dict[str, object] = {}
    for text in settings or []:
        table = override(table, text)
    chosen = Section.model_validate({**table, "name": name})
    loaded, folder = membership.prepare(experiment, overrides, engine, output, "attack")
    found = membership.watched(
        quiet or as_json,
        lambda calls: attack_by_name(loaded, chosen, folder, calls, fine_tune=fine_tune),
    )
    membership.report_attack(found.table(), found.success, (epsilon, delta), folder, as_json)
