# SPDX-License-Identifier: Apache-2.0
"""`fedrec privacy`: epsilon of a number of rounds, noise for a target epsilon, and explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli import options as shared
from simulations.cli.options import overrides_of, setting_option

if TYPE_CHECKING:
    from fedrec.privacy.accounting.accountant import Report
    from fedrec.privacy.plan import Plan
    from fedrec.privacy.question import Question

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_QUESTION = "fedrec.privacy.question:Question"
Clients = Annotated[str | None, setting_option("clients", of=_QUESTION)]
Cohort = Annotated[str | None, setting_option("cohort", of=_QUESTION)]
Rounds = Annotated[str | None, setting_option("rounds", of=_QUESTION)]
Multiplier = Annotated[str | None, setting_option("noise-multiplier", of=_QUESTION)]
Epsilon = Annotated[str | None, setting_option("epsilon", of=_QUESTION)]
Delta = Annotated[str | None, setting_option("delta", of=_QUESTION)]
Sampler = Annotated[str | None, setting_option("sampler", of=_QUESTION)]
Separation = Annotated[str | None, setting_option("separation", of=_QUESTION)]
Adjacency = Annotated[str | None, setting_option("adjacency", of=_QUESTION)]
Backend = Annotated[str | None, setting_option("backend", of=_QUESTION)]
Mechanism = Annotated[str | None, setting_option("mechanism", of=_QUESTION)]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help='Print only one JSON object; an infinite epsilon is the string "inf".'
    ),
]


@app.command()
def epsilon(
    clients: Clients,
    cohort: Cohort,
    rounds: Rounds,
    noise_multiplier: Multiplier,
    delta: Delta = None,
    sampler: Sampler = None,
    separation: Separation = None,
    adjacency: Adjacency = None,
    backend: Backend = None,
    mechanism: Mechanism = None,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon of a number of rounds (an upper bound)."""
    _answer({key: value for key, value in locals().items() if key != "as_json"}, as_json)


@app.command(short_help="Compute the smallest noise multiplier for an epsilon.")
def calibrate(
    epsilon: Epsilon,
    clients: Clients,
    cohort: Cohort,
    rounds: Rounds,
    delta: Delta = None,
    sampler: Sampler = None,
    separation: Separation = None,
    adjacency: Adjacency = None,
    backend: Backend = None,
    mechanism: Mechanism = None,
    as_json: AsJson = False,
) -> None:
    """Compute the smallest noise multiplier z for a target epsilon; relative to 2S under
    replace-one, S under add-remove."""
    _answer({key: value for key, value in locals().items() if key != "as_json"}, as_json)


@app.command(short_help="Explain the guarantee of an experiment before it runs.")
def explain(
    experiment: Annotated[
        str | None, typer.Argument(help="Experiment with a [privacy] table.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        shared.overrides("Override a key of the experiment, such as rounds=100; may repeat."),
    ] = None,
    clients: Clients = None,
    cohort: Cohort = None,
    rounds: Rounds = None,
    noise_multiplier: Multiplier = None,
    delta: Delta = None,
    sampler: Sampler = None,
    separation: Separation = None,
    adjacency: Adjacency = None,
    backend: Backend = None,
    mechanism: Mechanism = None,
) -> None:
    """Explain what the epsilon of an experiment (or of options as in `epsilon`) means for a user,
    and what it does not cover."""
    options = {
        k: v for k, v in locals().items() if k not in ("experiment", "overrides") and v is not None
    }
    for line in (
        _explain_experiment(experiment, overrides or [], options)
        if experiment
        else _explain(options)
    ):
        typer.echo(line)


def _explain(options: dict[str, Any]) -> list[str]:
    """Of numbers alone."""
    from fedrec.privacy.explain import lines

    question = _question(options)
    plan = question.plan()
    return lines(question.answer(plan), plan.config.adjacency)


def _answer(options: dict[str, Any], as_json: bool) -> None:
    question = _question(options)
    plan = question.plan()
    report = question.answer(plan)
    _print_json(question, plan, report) if as_json else _print_table(question, plan, report)


def _question(options: dict[str, Any]) -> Question:
    from fedrec.experiment.overrides import override
    from fedrec.privacy.question import Question

    table: dict[str, Any] = {}
    for text in overrides_of({key.replace("_", "-"): value for key, value in options.items()}):
        table = override(table, text)
    return Question.parse(table)


def _explain_experiment(source: str, overrides: list[str], options: dict[str, Any]) -> list[str]:
    import numpy as np

    from fedrec.data.population import Population
    from fedrec.errors import ExperimentError
    from fedrec.experiment.loading import load
    from server.privacy.phase_plans import PhasePlans

    beside = sorted(set(options) - {"clients"})
    if beside:
        raise ExperimentError(
            "an experiment already has these settings",
            expected="an experiment, or options",
            got=", ".join("--" + key.replace("_", "-") for key in beside),
            fix="change a key of the experiment with --set, such as --set privacy.delta=1e-6",
        )
    experiment = load(source, overrides)
    if experiment.privacy is None or "clients" in options:
        clients = np.arange(_clients(options.get("clients", "1")))
    else:
        clients = Population.of(experiment).partition.training_clients
    phases = PhasePlans.before_a_run(experiment, clients)
    return [*phases.lines(phases.forecast()), *phases.phase_lines()]


def _clients(text: str) -> int:
    from fedrec.errors import ExperimentError

    if not text.isdecimal() or not int(text):
        raise ExperimentError(
            "wrong number of clients",
            expected="a whole number of at least 1",
            got=text,
            fix="--clients 1000",
        )
    return int(text)


def _rows(question: Question, plan: Plan, report: Report) -> dict[str, Any]:
    """The printed values, by their names in the JSON object."""
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
        "order": report.order,
        "attack_epsilon": report.attack,
    }


def _print_json(question: Question, plan: Plan, report: Report) -> None:
    import json
    import math

    rows = {**_rows(question, plan, report), "caveats": list(report.caveats)}
    # JSON has no infinity; "inf" is what float("inf") reads in most languages.
    strict = {
        key: str(v) if isinstance(v, float) and math.isinf(v) else v for key, v in rows.items()
    }
    typer.echo(json.dumps(strict, allow_nan=False))


def _print_table(question: Question, plan: Plan, report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedrec.privacy.caveats import warnings
    from fedrec.privacy.explain import sentence

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for key, value in _rows(question, plan, report).items():
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), shown)
    Console().print(table)
    typer.echo(sentence(report, plan.config.adjacency))
    for warning in warnings(plan, backend=question.backend):
        typer.echo(warning)
