# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation: architecture, licences, plug-ins, pictures, site, notebooks and
commands."""

import importlib
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Annotated, Literal

import flwr.app  # noqa: F401  # its handler of logs keeps the stream of its first import
import pytest
from pydantic import Field

import fedrec
from fedrec.components.registry import KINDS, METRIC, available, available_names, ours, settings_of
from fedrec.config import Config
from fedrec.privacy.plan import PrivacyConfig
from simulations import cli, runner
from simulations.cli.components import TEMPLATES
from tests.simulations.helpers import flwr_command

# The picture of the architecture is that of the script.

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_is_the_one_that_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))["draw"]()
    assert (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8") == drawn
    assert drawn.count("<rect") == 6


SCRIPT = ROOT / "docs" / "licences.py"


def told(tmp_path, *packages):
    """The table of a bill of packages with licences in the form of CycloneDX, and the errors."""
    bill = {"components": [{"name": n, "version": "1", "licenses": own} for n, own in packages]}
    (tmp_path / "sbom.json").write_text(json.dumps(bill))
    command = [sys.executable, SCRIPT, tmp_path / "sbom.json", tmp_path / "table.csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    return (tmp_path / "table.csv").read_text().splitlines(), done.stderr, done.returncode


def named(*names):
    return [{"license": {"name": name}} for name in names]


@pytest.mark.parametrize(
    ("licences", "refused"),
    [
        (named("GPL-3.0-only"), True),
        (named("License :: OSI Approved :: GNU General Public License v3 (GPLv3)"), True),
        ([{"expression": "AGPL-3.0-or-later"}], True),
        ([{"expression": "GPL-2.0-only OR MIT"}], False),
        (named("LGPL-3.0-only"), False),
        (named("GNU Lesser General Public License v3 or later (LGPLv3+)"), False),
        ([], True),
    ],
)
def test_a_licence_that_would_extend_to_fedrec_ends_the_release(tmp_path, licences, refused):
    table, errors, code = told(tmp_path, ("fine", named("MIT")), ("odd", licences))
    assert len(table) == 3 and bool(code) == refused
    assert ("odd has" in errors) == refused and "fine" not in errors


# Five questions of a new user, and the pages that answer them, at most two links from README.md.

QUESTIONS = {
    "my table": "docs/tutorials/own-data.md",
    "a new strategy": "docs/guides/plugins.md",
    "two real nodes": "docs/guides/deployment.md",
    "what epsilon means": "docs/privacy.md",
    "why numbers differ from a paper's": "docs/papers/privrec.md",
}


def linked(page: Path) -> set[Path]:
    """The pages of the repository that a page links to."""
    links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_two_links(question):
    first = linked(ROOT / "README.md")
    assert all(page.exists() for page in first)
    reached = first.union(*(linked(page) for page in first))
    assert ROOT / QUESTIONS[question] in reached


# docs/plugins.md has the contract of every kind of component, and for kinds with a template the
# example that `fedrec new` writes, which runs with its TOML; for the others a built-in one.

PLUGINS = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = {
    (lang, kind): text
    for lang, kind, text in re.findall(r"```(python|toml) (\w+)\n(.*?)```", PLUGINS, re.S)
}


def class_of(kind):
    """Name of the component's class in its block."""
    names = re.findall(r"^class (\w+)\(", BLOCKS["python", kind], re.M)
    (name,) = [name for name in names if not name.endswith("Config")]
    return name


@pytest.fixture
def my_idea(tmp_path, monkeypatch):
    """The package of the page: one module per example, and the data that its dataset reads."""
    package = tmp_path / "my_idea"
    package.mkdir()
    (package / "__init__.py").touch()
    for kind in TEMPLATES:
        (package / f"{kind}.py").write_text(BLOCKS["python", kind])
    rows = [
        f"u{user},a{(user * artist) % 13},{user + artist}"
        for user in range(24)
        for artist in range(1, 9)
    ]
    (tmp_path / "plays.csv").write_text("\n".join(["listener,artist,plays", *rows]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_idea"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_example_is_what_fedrec_new_writes(kind, fedrec, tmp_path):
    name = re.sub("(?<!^)(?=[A-Z])", "-", class_of(kind)).lower()
    assert fedrec("new", kind, name, "--into", tmp_path)[0] == 0
    file = tmp_path / f"{name.replace('-', '_')}.py"
    assert BLOCKS["python", kind].strip() == file.read_text(encoding="utf-8").strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind != "attack"])
def test_the_toml_runs(kind, my_idea, tiny_experiment, tmp_path):
    own = tomllib.loads(BLOCKS["toml", kind].replace('"plays.csv"', f'"{tmp_path / "plays.csv"}"'))
    table = {**tiny_experiment(), **own}
    if "evaluation" in own:
        table["evaluation"] = {**tiny_experiment()["evaluation"], **own["evaluation"]}
    if kind == "dataset":
        table["positive-above"] = 0.5
    result = runner.run(table, output=tmp_path / "run")
    assert len(result.rounds) == 2 and 0 <= result.metrics["hits@5"] <= 1
    assert kind != "metric" or 0 <= result.metrics["f-measure@5"] <= 1
    assert kind != "baseline" or set(result.baselines) == {"popularity", "my_idea.baseline:ItemKnn"}


REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
)
ENTRIES = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.M)
OURS = r"(?:fedrec|clients|server|strategies|simulations)"


def of_plugins() -> set[str]:
    """Names that docs/plugins.md imports in its examples, and dotted names of classes in its
    text."""
    imports = re.findall(rf"^from ({OURS}[\w.]+) import (.+)$", PLUGINS, re.M)
    names = {f"{module}.{name.strip()}" for module, found in imports for name in found.split(",")}
    return names | set(re.findall(rf"`({OURS}(?:\.\w+)+\.[A-Z]\w+)`", PLUGINS))


def has_entry(name: str) -> bool:
    """Whether an object or its module is on a page."""
    return name in ENTRIES or name.rpartition(".")[0] in ENTRIES


def test_every_entry_exists():
    assert len(ENTRIES) > 50 and len(set(ENTRIES)) == len(ENTRIES)
    for entry in ENTRIES:
        assert pkgutil.resolve_name(entry) is not None


def test_every_public_name_has_an_entry():
    headings = re.findall(r'heading: "fedrec\.(\w+)"', REFERENCE)
    assert sorted(headings) == sorted(fedrec.__all__)
    assert {pkgutil.resolve_name(entry) for entry in ENTRIES} >= {
        getattr(fedrec, name) for name in fedrec.__all__
    }


def test_every_name_of_the_page_on_plug_ins_has_an_entry():
    names = {name for name in of_plugins() if not name.startswith("fedrec.errors.")}
    assert len(names) > 30 and "strategies.base.CohortStrategy" in names
    assert [name for name in sorted(names) if not has_entry(name)] == []


def test_the_columns_of_a_result_are_on_the_page(tiny_experiment, tmp_path):
    private = {
        "sampler": {"name": "fixed-size", "cohort": 4},
        "privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0},
        "early-stopping": {},
        "split": {"name": "user-holdout", "validation-users": 0.2},
    }
    result = runner.run({**tiny_experiment(), **private}, output=tmp_path / "run")
    table = REFERENCE.split("## Columns of a result")[1]
    named = set(re.findall(r"`([\w-]+)`", table))
    metrics = available_names(METRIC)
    columns = {str(name).partition("@")[0] for name in result.rounds} - set(metrics)
    own = {name for name in columns if not name.startswith("validation-")}
    assert {"round", "epsilon"} < own <= named and columns > own
    assert {result.users.index.name, result.groups.index.name, result.gaps.index.name} <= named


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    subprocess.check_call([sys.executable, "docs/settings_page.py", "docs/settings.md"], cwd=ROOT)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    page = (tmp_path / "reference" / "fedrec.html").read_text(encoding="utf-8")
    assert "runs/" in page and 'id="simulations.runner.run"' in page
    assert (tmp_path / "changelog.html").exists()


# The notebooks run from their first cell to their last, are stored without outputs, and show a
# progress bar, a result and a plot.

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def outputs(notebook, kind):
    """What the cells of a notebook showed in one MIME type."""
    shown = (out for cell in notebook.cells for out in cell.get("outputs", ()))
    return [out["data"][kind] for out in shown if kind in out.get("data", {})]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    notebook = nbformat.read(file, as_version=4)
    assert not outputs(notebook, "text/plain")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()
    pages = outputs(notebook, "text/html")
    assert outputs(notebook, "image/png") and any("<table" in page for page in pages)
    said = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert not any("ipywidgets" in str(out) for out in said)


# Tutorials, guides and how-tos: their files are written, and their Python and commands run, in the
# order of the page.
#
# Only what a reader of the rendered page sees is used. A block that begins with a comment such as
# `# shop.toml` is that file (`# ridge.py, continued`: appended to it; `# private.toml, a copy of
# shop.toml with this at its end`: appended to a copy), commands in `bash` blocks must succeed, or
# fail if `# is refused` stands behind them, and other `python` blocks are executed in the same
# folder. Commands are fedrec's, `flwr run .` and `pytest`; they find files of the folder only after
# `export PYTHONPATH=.`, or with it before them.

DOCS = ROOT / "docs"
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
    done = None
    if arguments[:3] == ["flwr", "run", "."]:
        done = flwr_command(place, place, arguments[-1].replace("$PWD", str(place)))
    if arguments[0] == "pytest":
        path = os.pathsep.join([str(place), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", *arguments, "-p", "no:cacheprovider"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if done is not None:
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


# Every back-quoted Python name and path of ours in the documentation exists in the source.

PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")
NAMED_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOREIGN = {"KNNWithMeans", "snake_case"}  # of another library
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+")
WRITTEN = re.compile(r"\.(txt|db|crt|key|jsonl)$")  # files that a run writes


@pytest.fixture(scope="module")
def known() -> set[str]:
    """All names in the source: definitions, arguments, attributes, keys, and files."""
    found: set[str] = set()
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    for file in (file for file in files if ".venvs" not in file.parts):  # of benchmarks
        found.update(*(part.split(".") for part in file.relative_to(ROOT).parts))
        own = file == Path(__file__)  # the names below are nowhere else
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
        found.update(names_of(code, texts=not own))
    return found


def names_of(code: CodeType, *, texts: bool) -> Iterator[str]:
    """Names in compiled code, those of its functions and classes included, and texts."""
    yield from (code.co_name, *code.co_varnames, *code.co_cellvars)
    for name in code.co_names:  # a module's is dotted
        yield from name.split(".")
    values = list(code.co_consts)
    while values:
        value = values.pop()
        if isinstance(value, CodeType):
            yield from names_of(value, texts=texts)
        elif isinstance(value, tuple | frozenset):  # such as the names of keyword arguments
            values.extend(value)
        elif texts and isinstance(value, str):
            yield value


def unknown_names(text: str, known: set[str]) -> list[str]:
    """Back-quoted names of a page, outside of code blocks, that the source does not have."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [name for name in quoted if name not in FOREIGN and not _is_there(name, known)]


def _is_there(name: str, known: set[str]) -> bool:
    if PATH.fullmatch(name):
        return (ROOT / name).exists()
    looks_like_python = re.search(r"[a-z]_[a-z]|[a-z][A-Z]|\w\.\w|\(\)$", name)
    if not (NAME.fullmatch(name) and looks_like_python) or WRITTEN.search(name):
        return True
    plain = name.removesuffix("()")
    return plain in known or (ROOT / plain).exists() or set(plain.split(".")) <= known


@pytest.mark.parametrize("page", NAMED_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_names_of_a_page_exist(page, known):
    assert not unknown_names(page.read_text(encoding="utf-8"), known)


def test_a_name_that_is_nowhere_is_found(known):
    page = "`phases` `Strategy.by_phases` `clients/nowhere.py` `no_such_name()` `fedrec.load`"
    assert unknown_names(page, known) == [
        "Strategy.by_phases",
        "clients/nowhere.py",
        "no_such_name()",
    ]


UPGRADES = re.findall(
    r"^((?:fedrec|clients|server|strategies|simulations)\.[\w.:]+) +-> ([\w.:]+)$",
    (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.parametrize(("before", "now"), UPGRADES)
def test_a_moved_module_is_where_the_upgrade_notes_say(before, now):
    assert _is_importable(now) and not _is_importable(before)


def _is_importable(name: str) -> bool:
    """Whether there is a module, or a name in a module (`package.module:Name`)."""
    module, _, member = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return not member or hasattr(found, member)


# The page of settings, which is generated with the site, has all components, and its rows are
# correct.


def test_the_page_has_every_table_and_built_in_component():
    made = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))
    headings = [line[4:] for line in made["page"]().splitlines() if line.startswith("### ")]
    tables = ["Top level" if name == "experiment" else f"[{name}]" for name in made["SECTIONS"]]
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


def test_the_keys_of_the_privacy_table_are_all_there():
    keys = {one.key for one in settings_of(PrivacyConfig)}
    fields = {name.replace("_", "-") for name in PrivacyConfig.model_fields}
    assert fields <= keys and "phases.NAME.clip-norm" in keys
