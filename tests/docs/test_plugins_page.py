# SPDX-License-Identifier: Apache-2.0
"""docs/plugins.md: every example runs with its TOML, and those of kinds with a template equal what
`fedrec new` writes."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedrec import testing
from fedrec.components.registry import KINDS, resolve
from fedrec.experiment.loading import load
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.scaffold.package import TEMPLATES, component_text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = {
    (lang, kind): text
    for lang, kind, text in re.findall(r"```(python|toml) (\w+)\n(.*?)```", PAGE, re.S)
}
KIND_NAMES = [kind.name for kind in KINDS]


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
    for kind in KIND_NAMES:
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


def test_there_is_an_example_of_every_kind():
    assert {kind for lang, kind in BLOCKS if lang == "python"} >= {*KIND_NAMES, "contract"}
    assert {kind for lang, kind in BLOCKS if lang == "toml"} == {*KIND_NAMES} - {"attack"}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_example_is_what_fedrec_new_writes(kind):
    assert BLOCKS["python", kind].strip() == component_text(kind, class_of(kind)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KIND_NAMES if kind != "attack"])
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


def test_early_stopping_stops(my_idea, tiny_experiment, tmp_path):
    """With a rate of zero nothing improves: one evaluation is the best, and two more are
    allowed."""
    own = tomllib.loads(BLOCKS["toml", "callback"])
    table = {
        **tiny_experiment(),
        **own,
        "rounds": 9,
        "strategy": {"name": "reptile", "server-lr": 1e-30},
    }
    assert len(runner.run(table, output=tmp_path / "run").rounds) == 3


@pytest.mark.parametrize(("metric", "rounds"), [("hits@5", 3), ("gini@5", 5), ("loss", 5)])
def test_early_stopping_knows_what_is_better(my_idea, tiny_experiment, tmp_path, metric, rounds):
    """Values that fall are worse hits, and better losses and concentrations."""
    from my_idea.callback import EarlyStopping

    callback = EarlyStopping(EarlyStopping.Config(metric=metric, patience=2))
    run = RunFolder.create(load(tiny_experiment()), tmp_path / "run")
    callback.on_start(run, 1, 5)
    stops = (callback.after_round({"round": n, metric: 1 / n}, 0.1) for n in range(1, 6))
    assert next((n for n, stop in enumerate(stops, 1) if stop), 5) == rounds


def test_the_contract_block_names_a_contract(my_idea, monkeypatch):
    source = BLOCKS["python", "contract"].replace("MyIdea", class_of("strategy"))
    names: dict = {"__name__": "page"}
    exec(compile(source, "page", "exec"), names)
    (found,) = [v for n, v in names.items() if n.startswith("Test")]
    assert issubclass(found, testing.StrategyContract)
    made = found()
    made.test_it_is_found_by_its_name()
    assert made.config().server_lr == 0.5


def test_the_groups_on_the_page_are_those_of_the_registry():
    named = re.findall(
        r"`(fedrec\.\w+)`", PAGE.split("The groups are")[1].split("takes precedence")[0]
    )
    assert {kind.group for kind in KINDS} <= set(named)
    assert resolve(KINDS[0], "synthetic")
