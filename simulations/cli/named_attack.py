# SPDX-License-Identifier: Apache-2.0
"""`fedrec attack run`: a membership attack by name, ours or a plug-in's."""

from __future__ import annotations

from typing import Annotated

import typer

from simulations.cli import attacks


def run(
    name: Annotated[str, typer.Argument(metavar="ATTACK", help="Name of the attack; see fedrec list attack.")],
    experiment: attacks.Name,
    settings: Annotated[
        list[str] | None, typer.Option("--with", "-w", help="A setting: --with signal=positives")
    ] = None,
    fine_tune: Annotated[bool, typer.Option(help="Fine-tune on a user's data before its scores are seen.")] = False,
    overrides: attacks.Overrides = None,
    engine: attacks.Engine = None,
    epsilon: attacks.Epsilon = None,
    delta: attacks.Delta = 1e-5,
    output: attacks.Output = None,
    as_json: attacks.AsJson = False,
    quiet: attacks.Quiet = False,
) -> None:
    """Train an experiment on half of its users and let an attack find out who they were."""
    from fedrec.experiment import Section, override
    from simulations.attacks.named import attack_by_name

    table: dict[str, object] = {}
    for text in settings or []:
        table = override(table, text)
    chosen = Section.model_validate({**table, "name": name})
    loaded, folder = attacks.prepare(experiment, overrides, engine, output, "attack")
    found = attacks.watched(
        quiet or as_json, lambda calls: attack_by_name(loaded, chosen, folder, calls, fine_tune=fine_tune)
    )
    attacks.report_attack(found.table(), found.success, (epsilon, delta), folder, as_json)
