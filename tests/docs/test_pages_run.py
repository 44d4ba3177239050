# SPDX-License-Identifier: Apache-2.0
"""Tutorials and how-tos: their files are written, and their Python and commands run, in the order
of the page.

A block with `title` is a file (appended to the file `from`), commands in `bash` blocks must
succeed, or fail if the block is marked `fails`, and other `python` blocks are executed.
"""

import re
import shlex
import sys
from pathlib import Path

import flwr.app  # noqa: F401  # its handler of logs keeps the stream of its first import
import pytest

from simulations import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "how-to.md"]
BLOCK = re.compile(
    r'^```(\w+)(?: title="([^"]+)")?(?: from="([^"]+)")?( fails)?\n(.*?)^```', re.S | re.M
)


def test_there_are_pages_and_every_block_is_read():
    assert len(PAGES) >= 3
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^```\w", text, re.M)), page


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, importable, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if not name.startswith(("fedrec", "simulations", "server", "clients", "strategies")):
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(tmp_path)):
                del sys.modules[name]


def command(line, monkeypatch, capsys):
    """Exit status and output of a command in this process."""
    arguments = shlex.split(line.removeprefix("PYTHONPATH=. "))  # as `place` is
    assert arguments[0] == "fedrec", line
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_its_first_line_to_its_last(page, place, monkeypatch, capsys):
    names: dict = {"__name__": "page"}
    for language, title, base, fails, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            before = (place / base).read_text() + "\n" if base else ""
            (place / title).write_text(before + text)
        elif language == "python":
            exec(compile(text, str(page), "exec"), names)
        elif language == "bash":
            for line in text.replace("\\\n", " ").strip().splitlines():
                if line == "export PYTHONPATH=.":  # as `place` is
                    continue
                code, said = command(line, monkeypatch, capsys)
                assert (code != 0) == bool(fails), f"{line}\n{said}"
                assert "Traceback" not in said
