# SPDX-License-Identifier: Apache-2.0
"""Changes of single keys of an experiment, as in `--set key=value`."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fedrec.errors import ExperimentError

log = logging.getLogger("fedrec")
_DEEPEST = 50  # parts of a key


def override(table: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A table with one key changed.

    Args:
        table: nested tables.
        text: such as `"strategy.server-lr=0.5"`; the value in TOML syntax, a bare word is a string.
            A new component name, such as `"strategy.name=fedavg"`, removes the settings of the
            previous component; engines share their settings.

    Raises:
        ExperimentError: the text is not of that form, or a part of the key is not a table.
    """
    key, equals, written = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or len(path) > _DEEPEST:
        raise ExperimentError(
            f"cannot read the override {text[:100]!r}",
            expected="key=value",
            got=text[:200],
            fix="--set strategy.server-lr=0.5",
        )
    try:
        full = re.sub(r"^(\s*[+-]?)\.(?=\d)", r"\g<1>0.", written)  # TOML has no .5
        value = tomllib.loads(f"value = {full}")["value"]
    except (ValueError, RecursionError):  # TOML's errors, and numbers of thousands of digits
        value = written.strip()  # a bare word, as on a command line
    chosen = table.get(path[0])
    if (
        path[1:] == ["name"]
        and path[0] != "engine"
        and isinstance(chosen, Mapping)
        and chosen.get("name") != value
    ):
        dropped = ", ".join(sorted(set(chosen) - {"name"}))  # they belong to their component
        if dropped:
            log.warning(
                "%s = %r leaves out the settings of %r: %s",
                *(key.strip(), value, chosen.get("name"), dropped),
            )
        return {**table, path[0]: {"name": value}}
    return _with(table, path, value, text)


def _with(table: Mapping[str, Any], path: list[str], value: Any, text: str) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {**table, head: value}
    inner = table.get(head, {})
    if not isinstance(inner, Mapping):
        raise ExperimentError(
            f"cannot apply the override {text!r}",
            expected=f"{head!r} to be a table",
            got=repr(inner),
            fix="check the key",
        )
    return {**table, head: _with(inner, rest, value, text)}
