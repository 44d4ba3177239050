# SPDX-License-Identifier: Apache-2.0
"""Options of a command from the settings of a component: one for each setting, with the same name,
type, description and default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import click
import typer.core

from fedrec.components.settings import Setting, settings_of
from fedrec.config import Config

_TYPES = {bool: click.BOOL, int: click.INT, float: click.FLOAT}


def options_of(config: type[Config]) -> Iterator[click.Option]:
    """An option for each setting that is no table. What is given is in `ctx.obj`, as in TOML."""
    for setting, field in zip(
        settings_of(config, nested=False), config.model_fields.values(), strict=True
    ):
        if setting.type != "table":
            yield _option(setting, field.annotation)


def _option(setting: Setting, annotation: Any) -> click.Option:
    key = setting.key
    parts = [annotation, *get_args(annotation)]
    kind = next((_TYPES[part] for part in parts if part in _TYPES), click.STRING)
    if get_origin(annotation) is Literal:
        kind = click.Choice(get_args(annotation))
    shown = setting.default.replace('"', "")
    default = f"  [default: {shown}]" if shown not in ("", "[]", "false") else ""
    bounds = f"  [{setting.range}]" if setting.range else ""
    return typer.core.TyperOption(
        param_decls=[f"--{key}/--no-{key}" if annotation is bool else f"--{key}"],
        help=setting.about + default + bounds,
        multiple=get_origin(annotation) is tuple,
        default=None,
        expose_value=False,
        callback=_keep,
        type=kind,
    )


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    given = ctx.ensure_object(dict)
    if value is not None and value != ():
        key = str(option.name).replace("_", "-")
        given[key] = list(value) if isinstance(value, tuple) else value
