# SPDX-License-Identifier: Apache-2.0
"""For the documentation site: links to files outside of docs/ become their text and the file's
name, and CHANGELOG.md becomes a page.

In the repository such links lead to code and examples; the site has only the pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_CHANGES = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```\w+) \w+$", re.M)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """The files of the site, with the changelog."""
    files.append(File.generated(config, "changelog.md", abs_src_path=str(_CHANGES)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with such links as text, and code fences without the words that tests read."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not target.startswith("../"):
            return match[0]
        name = target.removeprefix("../")
        text = match[1].strip("`")
        return f"`{name}`" if text.strip("/") in name else f"{match[1]} (`{name}`)"

    if page.file.src_uri == "changelog.md":
        markdown = markdown.replace("](docs/", "](")
    return _LINK.sub(plain, _FENCE.sub(r"\1", markdown))
