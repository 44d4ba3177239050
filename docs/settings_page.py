# SPDX-License-Identifier: Apache-2.0
"""The documentation page of all settings, which `make docs` generates for the site: `python
docs/settings_page.py docs/settings.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from fedrec.components.registry import KINDS, Setting, available, ours, settings_of
from fedrec.components.sections import Section
from fedrec.config import Config
from fedrec.errors import FedrecError
from fedrec.experiment.schema import Experiment

SECTIONS: dict[str, type[Config]] = {
    "experiment": Experiment,
    **{
        name.replace("_", "-"): cls
        for name, field in Experiment.model_fields.items()
        for cls in (field.annotation, *get_args(field.annotation))
        if isinstance(cls, type) and issubclass(cls, Config) and not issubclass(cls, Section)
    },
}
"""Tables of an experiment whose keys are fixed; the others name a component."""
_HEAD = """# Settings

Every key of an experiment: type, default, range and meaning. This page is made from the code by
`python docs/settings_page.py docs/settings.md`; `fedrec list KIND NAME` prints the same
table for one component. An empty default means that the key is left out.
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
