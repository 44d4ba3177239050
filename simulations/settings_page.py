# SPDX-License-Identifier: Apache-2.0
"""The documentation page of all settings, which `make docs` generates for the site: `python -m
simulations.settings_page docs/settings.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedrec.components.registry import KINDS, Setting, available, ours, settings_of
from fedrec.errors import FedrecError
from simulations.cli.listing import SECTIONS, section_class

_HEAD = """# Settings

Every key of an experiment: type, default, range and meaning. This page is made from the code by
`python -m simulations.settings_page docs/settings.md`; `fedrec list KIND NAME` prints the same
table for one component, `fedrec list section privacy` for a table of the experiment, and `--json`
prints them for programs. An empty default means that the key is left out.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD, "## Tables of an experiment\n"]
    for name in SECTIONS:
        title = "Top level" if name == "experiment" else f"[{name}]"
        parts.append("\n".join(_part(f"### {title}", section_class(name))))
    for kind in KINDS:
        parts.append(f"## {kind.name.capitalize()}: `[{kind.key}]`\n")
        for name, found in available(kind):
            if not isinstance(found, FedrecError) and ours(kind, found):
                parts.append("\n".join(_part(f"### {kind.name} `{name}`", found)))
    return "\n".join(parts)


def _part(title: str, component: type) -> Iterator[str]:
    yield title
    yield ""
    about = getattr(component, "title", "") or (inspect.getdoc(component) or "").split("\n\n")[0]
    yield " ".join(str(about).split()).replace("|", "\\|")
    yield ""
    settings = settings_of(component, nested=component is not section_class("experiment"))
    yield from _table(settings) if settings else ["It has no settings.", ""]


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield "| key | type | default | range | meaning |"
    yield "|---|---|---|---|---|"
    for one in settings:
        cells = (
            f"`{one.key}`",
            one.type,
            f"`{one.default}`" if one.default else "",
            f"`{one.range}`" if "[" in one.range else one.range,  # "[a][b]" would be a link
            one.about,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def main() -> None:
    """Write the page to a file."""
    Path(sys.argv[1]).write_text(page().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
