# SPDX-License-Identifier: Apache-2.0
"""Loading of experiments from TOML files, by name, and from Flower's run configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedrec.errors import ExperimentError, unknown
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import override
from fedrec.runtime.files import parse_json, read_toml


def load(
    source: str | Path | Mapping[str, Any] | Experiment, overrides: Iterable[str] = ()
) -> Experiment:
    """Read, override, check and resolve an experiment.

    Args:
        source: a TOML file, the name of a shipped experiment, a table, or an experiment.
        overrides: texts such as `"strategy.server-lr=0.5"`; values in TOML syntax, bare words are
            strings.

    Raises:
        ExperimentError: the file is missing or not TOML, or a key or value is wrong.
    """
    texts = list(overrides)
    if isinstance(source, Experiment):
        if not texts:
            return source.resolve()
        source = source.table()
    return Experiment.parse(read(source, texts)).resolve()


def read(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the table of an experiment with overrides, not validated and without defaults.

    Args:
        source: a TOML file, the name of a shipped experiment, or a table.
        overrides: see `load`.

    Raises:
        ExperimentError: the file is missing or not TOML, or an override cannot be read.
    """
    table = dict(source) if isinstance(source, Mapping) else _read(source)
    for text in overrides:
        table = override(table, text)
    return table


def from_run_config(run_config: Mapping[str, Any]) -> Experiment:
    """Load the experiment that a Flower run configuration names.

    Keys: `resolved` (a whole experiment as JSON, from fedrec's engines), or `experiment` (a TOML
    file or the name of a shipped experiment) and `overrides` (like `--set`, separated by `;`).

    Raises:
        ExperimentError: the experiment is missing or invalid.
    """
    if run_config.get("resolved"):
        try:
            table = dict(parse_json(str(run_config["resolved"])))
        except (ValueError, TypeError) as error:  # not JSON, or not an object
            raise ExperimentError(
                "the resolved experiment in the run configuration cannot be read",
                got=str(error),
                fix="remove the key resolved, and name the experiment with the key experiment",
            ) from None
        return Experiment.parse(table)
    if not run_config.get("experiment"):
        fix = "flwr run . --run-config 'experiment=\"privrec-synthetic\"' (or an absolute path)"
        raise ExperimentError("the run configuration names no experiment", fix=fix)
    overrides = [part for part in str(run_config.get("overrides", "")).split(";") if part.strip()]
    return load(str(run_config["experiment"]), overrides)


def shipped_experiments() -> dict[str, Path]:
    """Files of the experiments shipped with fedrec, by name."""
    folder = Path(__file__).resolve().parents[2] / "simulations" / "experiments"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def _read(source: str | Path) -> dict[str, Any]:
    if not isinstance(source, str | Path):
        raise ExperimentError(
            "the experiment is missing",
            expected="a TOML file, the name of a shipped experiment, a table, or an Experiment",
            got=repr(source)[:200],
            fix="fedrec.run('privrec-synthetic'), or fedrec.try_table for a DataFrame",
        )
    try:
        path = Path(source).expanduser()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, zero byte or unknown home folder
        path = Path()
        exists = False
    if not exists:
        shipped = shipped_experiments()
        if str(source) not in shipped:
            expected = "a TOML file, or the name of a shipped experiment"
            raise unknown("experiment", str(source)[:200], shipped, expected)
        path = shipped[str(source)]
    return read_toml(path, ExperimentError)
