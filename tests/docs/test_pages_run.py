# SPDX-License-Identifier: Apache-2.0
"""Tutorials, guides and how-tos: their files are written, and their Python and commands run, in
the order of the page.

Only what a reader of the rendered page sees is used. A block that begins with a comment such as
`# shop.toml` is that file (`# ridge.py, continued`: appended to it; `# private.toml, a copy of
shop.toml with this at its end`: appended to a copy), commands in `bash` blocks must succeed, or
fail if `# is refused` stands behind them, and other `python` blocks are executed in the same
folder. Commands are fedrec's, `flwr run .` and `pytest`; they find files of the folder only after
`export PYTHONPATH=.`, or with it before them.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import flwr.app  # noqa: F401  # its handler of logs keeps the stream of its first import
import pytest

from simulations import cli
from tests.simulations.bundles import flwr_command

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted([*DOCS.glob("tutorials/*.md"), *DOCS.glob("guides/*.md"), DOCS / "how-to.md"])
FLOWER = DOCS / "guides" / "flower-app.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)
FILE = re.compile(
    r"# ([\w./-]+\.\w+)(?:, (?:(continued)|a copy of ([\w./-]+) with this at its end))?\n"
)
REFUSED = "  # is refused"
EXPORT = "export PYTHONPATH=."


def test_there_are_pages_and_every_block_is_read():
    assert len(PAGES) >= 3
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^```\w", text, re.M)), page


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if not name.startswith(("fedrec", "simulations", "server", "clients", "strategies")):
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(tmp_path)):
                del sys.modules[name]


def command(line, place, monkeypatch, capsys):
    """Exit status and output of a command: fedrec in this process, others in their own."""
    arguments = shlex.split(line)
    if arguments[:3] == ["flwr", "run", "."]:
        config = arguments[-1].replace("$PWD", str(place))
        done = flwr_command(place, place, config)
        return done.returncode, done.stdout + done.stderr
    if arguments[0] == "pytest":
        path = os.pathsep.join([str(place), str(DOCS.parent)])
        done = subprocess.run(
            [sys.executable, "-m", *arguments, "-p", "no:cacheprovider"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr
    assert arguments[0] == "fedrec", line
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def name_of(page):
    """Of a page, within its folder."""
    return str(page.relative_to(DOCS).with_suffix(""))


def write(place, title, continued, base, text):
    """Write a file of a page, or append to it or to a copy of another."""
    file = place / title
    before = (place / (base or title)).read_text() + "\n" if base or continued else ""
    file.parent.mkdir(exist_ok=True)
    file.write_text(before + text)


def run_page(page, place, monkeypatch, capsys):
    """Write the files of a page and run its blocks, in order."""
    names: dict = {"__name__": "page"}
    exported = False
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if file := FILE.match(text):
            write(place, *file.groups(), text)
        elif language == "python":
            with monkeypatch.context() as session:
                session.syspath_prepend(str(place))
                exec(compile(text, str(page), "exec"), names)
        elif language == "bash":
            for line in text.replace("\\\n", " ").strip().splitlines():
                exported |= line == EXPORT
                if line != EXPORT:
                    run_line(line, exported, place, monkeypatch, capsys)


def run_line(line, exported, place, monkeypatch, capsys):
    """Run a command of a page, which must succeed unless the page says that it is refused."""
    given = line.removesuffix(REFUSED).removeprefix("PYTHONPATH=. ")
    with monkeypatch.context() as shell:
        if exported or line.startswith("PYTHONPATH=. "):
            shell.syspath_prepend(str(place))
            shell.setenv(
                "PYTHONPATH",
                os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")])),
            )
        code, said = command(given, place, shell, capsys)
    assert (code != 0) == line.endswith(REFUSED), f"{line}\n{said}"
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if page != FLOWER], ids=name_of)
def test_a_page_runs_from_its_first_line_to_its_last(page, place, monkeypatch, capsys):
    run_page(page, place, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(600)
def test_the_page_of_a_flower_app_runs(place, monkeypatch, capsys):
    run_page(FLOWER, place, monkeypatch, capsys)
