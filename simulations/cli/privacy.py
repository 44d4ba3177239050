# SPDX-License-Identifier: Apache-2.0
"""`fedrec privacy`: epsilon of a number of rounds, noise for a target epsilon, and explanations."""

from typing import Annotated

import numpy as np
import typer
import typer.core
from rich.console import Console
from rich.table import Table

from fedrec.components.sections import override
from fedrec.data.population import Population
from fedrec.experiment.schema import load
from fedrec.privacy.statement import Question, sentence, warnings
from fedrec.runtime.files import json_text
from server.privacy.guard import PhasePlans
from simulations.cli import options
from simulations.cli.options import AsJson, Named, command_with

app = options.group("Compute epsilons and noise, and explain guarantees.")

_Epsilon = command_with(lambda _: Question, "epsilon")
_Calibrate = command_with(lambda _: Question, "noise_multiplier")


@app.command("epsilon", cls=_Epsilon)
def _epsilon(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Compute the epsilon of a number of rounds (an upper bound)."""
    _answer(ctx, as_json)


@app.command(
    "calibrate", cls=_Calibrate, short_help="Compute the smallest noise multiplier for an epsilon."
)
def _calibrate(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Compute the smallest noise multiplier z for a target epsilon; the noise's standard deviation
    is z * 2S under replace-one and z * S under add-remove."""
    _answer(ctx, as_json)


@app.command("explain", short_help="Explain the guarantee of an experiment before it runs.")
def _explain(
    experiment: Named,
    overrides: Annotated[
        list[str] | None,
        options.overrides("Override a key of the experiment, such as rounds=100; may repeat."),
    ] = None,
) -> None:
    """Explain what the epsilon of an experiment means for a user, and what it does not cover."""
    loaded = load(experiment, overrides or [])
    clients = np.arange(1)  # for the error of an experiment without [privacy]
    if loaded.privacy is not None:
        clients = Population.of(loaded).partition.training_clients
    phases = PhasePlans.before_a_run(loaded, clients)
    for line in (*phases.lines(phases.forecast()), *phases.phase_lines()):
        typer.echo(line)


def _answer(ctx: typer.Context, as_json: bool) -> None:
    given = dict(ctx.obj or {})
    if "mechanism" in given:  # a name, or a table as in TOML
        given = override(given, f"mechanism={given['mechanism']}")
    question = Question.parse(given)
    plan = question.plan()
    report = question.answer(plan)
    rows = {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "noise_multiplier": plan.noise_multiplier,
        "clients": question.clients,
        "cohort": int(question.cohort) if question.cohort.is_integer() else question.cohort,
        "rounds": question.rounds,
        "sampler": question.sampler,
        "separation": question.separation,
        "adjacency": question.adjacency,
        "mechanism": question.mechanism,
        "backend": question.backend,
        "method": report.method,
        "attack_epsilon": report.attack,
    }
    if as_json:
        typer.echo(json_text({**rows, "caveats": report.caveats}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for key, value in rows.items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), shown)
    Console().print(table)
    typer.echo(sentence(report, plan.config.adjacency))
    for warning in warnings(plan, backend=question.backend):
        typer.echo(warning)
