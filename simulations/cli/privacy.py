# SPDX-License-Identifier: Apache-2.0
"""`fedrec privacy`: epsilons, noise for a target, explanations, and epsilons of single users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
import typer.core
from rich.console import Console
from rich.table import Table

from fedrec.components import registry
from fedrec.components.sections import component_of, override
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment, load
from fedrec.privacy.accounting.accountant import Report
from fedrec.privacy.personal import PersonalNoise, epsilon_table, summary, words
from fedrec.privacy.plan import Plan
from fedrec.privacy.statement import Question, lines, sentence, warnings
from fedrec.runtime.files import json_text, write_atomically
from server.privacy.guard import PhasePlans
from server.privacy.personal_budgets import check_no_phases
from simulations.cli import options
from simulations.cli.options import command_with

# `fedrec privacy`: epsilon of a number of rounds, noise for a target epsilon, and explanations.

app = options.group("Compute epsilons and noise, and explain guarantees.")

_Json = Annotated[
    bool, typer.Option("--json", help='Print the result as JSON; infinity is the string "inf".')
]
_Epsilon = command_with(lambda _: Question, "epsilon")
_Calibrate = command_with(lambda _: Question, "noise_multiplier")


@app.command("epsilon", cls=_Epsilon)
def _epsilon(ctx: typer.Context, as_json: _Json = False) -> None:
    """Compute the epsilon of a number of rounds (an upper bound)."""
    _answer(ctx, as_json)


@app.command(
    "calibrate", cls=_Calibrate, short_help="Compute the smallest noise multiplier for an epsilon."
)
def _calibrate(ctx: typer.Context, as_json: _Json = False) -> None:
    """Compute the smallest noise multiplier z for a target epsilon; the noise's standard deviation
    is z * 2S under replace-one and z * S under add-remove."""
    _answer(ctx, as_json)


@app.command(
    "explain", cls=_Epsilon, short_help="Explain the guarantee of an experiment before it runs."
)
def _explain(
    ctx: typer.Context,
    experiment: Annotated[
        str | None, typer.Argument(help="Experiment with a [privacy] table.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        options.overrides("Override a key of the experiment, such as rounds=100; may repeat."),
    ] = None,
) -> None:
    """Explain what the epsilon of an experiment (or of options as in `epsilon`) means for a user,
    and what it does not cover."""
    if experiment:
        sentences = _explain_experiment(experiment, overrides or [], dict(ctx.obj or {}))
    else:
        question = _question(ctx)
        plan = question.plan()
        sentences = lines(question.answer(plan), plan.config.adjacency)
    for line in sentences:
        typer.echo(line)


def _answer(ctx: typer.Context, as_json: bool) -> None:
    question = _question(ctx)
    plan = question.plan()
    report = question.answer(plan)
    rows = _rows(question, plan, report)
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


def _question(ctx: typer.Context) -> Question:
    table = dict(ctx.obj or {})
    if "mechanism" in table:  # a name, or a table as in TOML
        table = override(table, f"mechanism={table['mechanism']}")
    return Question.parse(table)


def _explain_experiment(source: str, overrides: list[str], given: dict[str, Any]) -> list[str]:
    clients = given.pop("clients", None)
    if given or (clients is not None and clients < 1):
        raise ExperimentError(
            "options cannot be combined with an experiment",
            expected="an experiment or options; with an experiment only --clients, at least 1",
            got=", ".join(f"--{key}" for key in given) or f"--clients {clients}",
            fix="change a key of the experiment with --set, such as --set privacy.delta=1e-6",
        )
    experiment = load(source, overrides)
    if experiment.privacy is None or clients is not None:
        chosen = np.arange(clients or 1)
    else:
        chosen = Population.of(experiment).partition.training_clients
    phases = PhasePlans.before_a_run(experiment, chosen)
    return [*phases.lines(phases.forecast()), *phases.phase_lines()]


def _rows(question: Question, plan: Plan, report: Report) -> dict[str, Any]:
    """Printed values by their names in the JSON object."""
    return {
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


# `fedrec privacy users`: true and requested epsilons of users who add their own noise.

_KEY = "Override a key of the experiment, such as step.epsilon=0.5; may repeat."


@app.command("users", short_help="Compute each user's epsilon.")
def _users(
    experiment: Annotated[
        str,
        typer.Argument(help="Experiment whose users add their own noise (step dpvae or dpsgd)."),
    ],
    overrides: Annotated[list[str] | None, options.overrides(_KEY)] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds; default: all rounds of the experiment.")
    ] = None,
    output: Annotated[Path | None, options.output("Output CSV file with one row per user.")] = None,
) -> None:
    """Compute each user's true and requested epsilon, without training."""
    loaded = load(experiment, overrides or [])
    noise = _personal_noise(loaded)
    table = _personal_epsilons(loaded, rounds)
    shown = Table("", "least", "10%", "median", "90%", "most", box=None, padding=(0, 2, 0, 0))
    for name, spread in summary(table).items():
        shown.add_row(
            name,
            *(value if isinstance(value, str) else f"{value:.4g}" for value in spread.values()),
        )
    Console().print(shown)
    for line in words(noise, table):
        typer.echo(line)
    if output is not None:
        write_atomically(output, table.to_csv())
        typer.echo(output)


def _personal_noise(experiment: Experiment) -> PersonalNoise:
    """The users' noise of a resolved experiment.

    Raises:
        ExperimentError: its step has no noise of users.
    """
    settings = experiment.settings(registry.STEP)
    if isinstance(settings, PersonalNoise):
        return settings
    raise ExperimentError(
        "users have no personal budgets with this step",
        expected="step dpvae or dpsgd",
        got=experiment.step.name,
        fix="use an experiment with one of these steps, such as dpvae-ml100k",
    )


def _personal_epsilons(experiment: Experiment, rounds: int | None = None) -> pd.DataFrame:
    """Table with one row per training client, see `fedrec.privacy.personal.epsilon_table`.

    It follows from the experiment: budgets from their seed, cohorts from seed and round. A sampled
    user is charged even if its upload fails.

    Args:
        experiment: a resolved experiment whose users add noise of their own.
        rounds: number of rounds; default: all of the experiment.

    Raises:
        ExperimentError: the experiment has another step, or phases with other steps.
    """
    settings = _personal_noise(experiment)
    check_no_phases(experiment)
    clients = Population.of(experiment).partition.training_clients
    sampler = component_of(registry.SAMPLER, experiment.sampler, clients, experiment.seed)
    asked = np.zeros(len(clients), dtype=np.int64)
    for number in range(1, (experiment.rounds if rounds is None else rounds) + 1):
        asked[np.searchsorted(clients, sampler.sample(number))] += 1
    return epsilon_table(settings, clients.tolist(), asked.tolist())
