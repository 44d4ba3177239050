# SPDX-License-Identifier: Apache-2.0
"""The page of settings, which is generated with the site, has all components, and its rows are
correct."""

import runpy
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedrec.components.registry import KINDS, available, ours, settings_of
from fedrec.config import Config
from fedrec.privacy.plan import PrivacyConfig
from simulations.cli.listing import SECTIONS

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "settings_page.py"


def test_the_page_has_every_table_and_built_in_component():
    page = runpy.run_path(str(SCRIPT))["page"]()
    headings = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    tables = ["Top level" if name == "experiment" else f"[{name}]" for name in SECTIONS]
    components = [
        f"{kind.name} `{name}`"
        for kind in KINDS
        for name, component in available(kind)
        if ours(kind, component)
    ]
    assert headings == [*tables, *components] and len(components) > 100


class Inner(Config):
    """A table within."""

    share: float = Field(default=0.5, ge=0, lt=1)
    """How much."""


class Outer(Config):
    """Settings of a made-up component."""

    rounds: int = Field(ge=1)
    """How often."""
    how: Literal["fast", "slow"] = "fast"
    """In which way,
    in two lines."""
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = (5, 10)
    """Of what."""
    inner: Inner = Inner()
    """A table."""
    rest: float | None = None
    """Left out."""


def test_a_setting_has_key_type_default_range_and_sentence():
    found = {one.key: one for one in settings_of(Outer)}
    assert list(found) == ["rounds", "how", "sizes", "inner", "inner.share", "rest"]
    assert (found["rounds"].default, found["rounds"].range) == ("required", ">= 1")
    assert (found["how"].type, found["how"].default) == ('"fast" or "slow"', '"fast"')
    assert found["how"].about == "In which way, in two lines."
    assert (found["sizes"].type, found["sizes"].default) == ("list of integer >= 1", "[5, 10]")
    assert (found["inner"].type, found["inner"].default) == ("table", "{ share = 0.5 }")
    assert found["inner.share"].range == ">= 0, < 1"
    assert (found["rest"].type, found["rest"].default) == ("number", "")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_setting_of_a_built_in_has_a_sentence(kind):
    for name, component in available(kind):
        if isinstance(component, type) and ours(kind, component):
            silent = [one.key for one in settings_of(component) if not one.about]
            assert not silent, f"{kind.name} {name}: {silent}"


def test_the_keys_of_the_privacy_table_are_all_there():
    keys = {one.key for one in settings_of(PrivacyConfig)}
    assert set(PrivacyConfig.keys()) <= keys and "phases.NAME.clip-norm" in keys
