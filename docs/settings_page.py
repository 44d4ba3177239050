# SPDX-License-Identifier: Apache-2.0
"""The documentation page of all settings, which `make docs` generates for the site: `python
docs/settings_page.py docs/settings.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedrec.components.registry import KINDS, Setting, available, ours, settings_of
from fedrec.errors import FedrecError
from simulations.cli.components import SECTIONS

_HEAD = """# Settings

Every key of an experiment: type, default, range and meaning. This page is made from the code by
`python docs/settings_page.py docs/settings.md`; `fedrec list KIND NAME` prints the same
table for one component, `fedrec list section privacy` for a table of the experiment, and `--json`
prints them for programs. An empty default means that the key is left out.
"""


def page() -> str:
    """The page as Markdown."""
    sections = [_HEAD, "## Tables of an experiment\n"]
    for name, section in SECTIONS.items():
        title = "Top level" if name == "experiment" else f"[{name}]"
        sections.append("\n".join(_section(f"### {title}", section)))
    for kind in KINDS:
        sections.append(f"## {kind.name.capitalize()}: `[{kind.key}]`\n")
        for name, component in available(kind):
            if not isinstance(component, FedrecError) and ours(kind, component):
                sections.append("\n".join(_section(f"### {kind.name} `{name}`", component)))
    return "\n".join(sections)


def _section(title: str, component: type) -> Iterator[str]:
    yield title
    yield ""
    about = getattr(component, "title", "") or (inspect.getdoc(component) or "").split("\n\n")[0]
    yield " ".join(str(about).split()).replace("|", "\\|")
    yield ""
    settings = settings_of(component, nested=component is not SECTIONS["experiment"])
    yield from _table(settings) if settings else ["It has no settings.", ""]


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield "| key | type | default | range | meaning |"
    yield "|---|---|---|---|---|"
    for setting in settings:
        bounds = setting.range
        cells = (
            f"`{setting.key}`",
            setting.type,
            f"`{setting.default}`" if setting.default else "",
            f"`{bounds}`" if "[" in bounds else bounds,  # "[a][b]" would be a link
            setting.about,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def main() -> None:
    """Write the page to a file."""
    Path(sys.argv[1]).write_text(page().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
