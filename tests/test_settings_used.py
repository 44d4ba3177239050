# SPDX-License-Identifier: Apache-2.0
"""Every setting serves somebody: a shipped experiment, study or example gives it a value other than
its default, a guide explains it, or a test of behaviour changes it. One that does none of that is
removed."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from pydantic_core import to_jsonable_python

from clients.device.policy import Policy
from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import read, shipped_experiments
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section
from fedrec.experiment.tables import EvaluationConfig
from fedrec.privacy.config import PrivacyConfig
from fedrec.runtime.text_files import read_toml
from simulations.cli.experiments.listing import SECTIONS, section_class
from simulations.deployment.layout import DeploymentConfig
from simulations.study.declaration import declared

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.md")]
TESTS = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
CODE = [
    *(file for file in (ROOT / "benchmarks").rglob("*.py") if ".venvs" not in file.parts),
    *(ROOT / "simulations/reproduce").rglob("*.py"),
]
STUDIES = [ROOT / "simulations/reproduce/papers", ROOT / "benchmarks"]
OTHER = {"node": Policy, "deployment": DeploymentConfig}  # by their files
WITHOUT_A_TEST = {
    "DeploymentConfig.revoked": "written by `fedrec deploy revoke`, whose tests read it",
}
"""Settings that are used in another way, with the reason."""


class Setting(NamedTuple):
    """A field, and the class that declares it first."""

    config: type[Config]
    field: str

    def __str__(self) -> str:
        return f"{self.config.__name__}.{self.field}"


def declaration(config: type[Config], field: str) -> Setting:
    """A subclass may give a setting another default; it is the same one."""
    known = (base for base in reversed(config.__mro__) if issubclass(base, Config))
    return Setting(next(base for base in known if field in base.model_fields), field)


def nested(annotation: Any) -> Iterator[type[Config]]:
    """The configuration classes of a field's type; not those of components."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Config) and one is not Section:
            yield one
        elif one is not annotation:
            yield from nested(one)


def components() -> Iterator[tuple[str, type[Config]]]:
    """Name and settings of all that have any: components, tables of an experiment, other files."""
    for kind in registry.KINDS:
        for name in registry.builtin_names(kind):
            component = registry.resolve(kind, name)
            if config := getattr(component, "Config", None):
                yield name, config
    yield from ((name, section_class(name)) for name in SECTIONS)
    yield from OTHER.items()


@cache
def names() -> Mapping[Setting, frozenset[str]]:
    """All settings, each with words of which one is in every text that means it."""
    found: dict[Setting, set[str]] = defaultdict(set)

    def add(config: type[Config], words: set[str]) -> None:
        for field, info in config.model_fields.items():
            setting = declaration(config, field)
            found[setting].update(words, {config.__name__, setting.config.__name__})
            for one in nested(info.annotation):
                add(one, words)

    for name, config in components():
        if config is Experiment:
            found.update({declaration(config, key): {"rounds"} for key in config.model_fields})
        else:
            add(config, {name, name.replace("-", "_")})
    return {setting: frozenset(words) for setting, words in found.items()}


@cache
def of_field(field: str) -> tuple[Setting, ...]:
    """The settings of one name."""
    return tuple(setting for setting in names() if setting.field == field)


def kind_of(config: type[Config], field: str) -> registry.Kind | None:
    """The kind of the components that a field names."""
    if config is Experiment:
        kinds = {kind.key: kind for kind in registry.KINDS} | {"callbacks": registry.CALLBACK}
        return kinds.get(field)
    lists = {
        (EvaluationConfig, "baselines"): registry.BASELINE,
        (EvaluationConfig, "metrics"): registry.METRIC,
        (PrivacyConfig, "mechanism"): registry.MECHANISM,
    }
    marked = (one for one in config.model_fields[field].metadata if isinstance(one, registry.Kind))
    return lists.get((config, field)) or next(marked, None)


def changed(config: type[Config], table: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings to which a table gives a value other than the default."""
    for key, value in table.items():
        field = key.replace("-", "_")
        info = config.model_fields.get(field)
        if info is None:  # of the table, such as a label
            continue
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if info.is_required() or to_jsonable_python(default, by_alias=True) != value:
            yield declaration(config, field)
        kind = kind_of(config, field)
        for one in value if isinstance(value, list) else [value]:
            if kind is not None:
                yield from changed_by(kind, one, default)
            elif isinstance(one, Mapping):
                for inner in nested(info.annotation):
                    tables = one.values() if field == "phases" else [one]
                    yield from (s for inside in tables for s in changed(inner, inside))


def changed_by(kind: registry.Kind, table: Any, default: Any = None) -> Iterator[Setting]:
    """The same of a table that names a component."""
    table = {"name": table} if isinstance(table, str) else table
    own = {"name": default.name} if isinstance(default, Section) else {}
    name = {**own, **table}.get("name")
    if name in registry.builtin_names(kind):
        config = getattr(registry.resolve(kind, name), "Config", Config)
        yield from changed(config, {key: value for key, value in table.items() if key != "name"})


def of_experiment(table: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings that an experiment changes, those of fine-tuning included."""
    yield from changed(Experiment, table)
    tuned = table.get("evaluation", {}).get("fine-tune", {})
    yield from changed_by(registry.STEP, {**table.get("step", {"name": "sgd"}), **tuned})


def of_options(options: Any) -> Iterator[Setting]:
    """The settings of systems and attacks among the options of a study's task."""
    inner = options.values() if isinstance(options, Mapping) else options
    if isinstance(options, Mapping) and isinstance(options.get("name"), str):
        for kind in (registry.ATTACK, registry.BASELINE, registry.MODEL):
            yield from changed_by(kind, options)
    for one in inner if isinstance(options, Mapping | list) else ():
        yield from of_options(one)


@cache
def by_experiments() -> frozenset[Setting]:
    """What shipped experiments, examples and studies change."""
    files = [*shipped_experiments().values(), *(ROOT / "examples").glob("*/experiment.toml")]
    found = {one for file in files for one in of_experiment(read_toml(file, ExperimentError))}
    for file in (file for folder in STUDIES for file in folder.glob("*.toml")):
        for task in (task for study in declared(file) for task in study.tasks):
            found.update(of_options(dict(task.options)))
            if source := task.options.get("experiment"):
                found.update(of_experiment(read(source, task.options.get("set", []))))
    return frozenset(found)


WORD = re.compile(r"[A-Za-z][\w-]*")
GIVEN = re.compile(  # `key = value`, `key=value` and `"key": value`, but not `key: type`
    r"""(?<![\w-])(?:([A-Za-z][\w-]*)\s*=|["']([A-Za-z][\w-]*)["']:)\s*(?=([^=\s][^,\n})\]]*))"""
)
QUOTED = re.compile(r"`-*([\w.-]+)[^`\n]*`")
PASSAGE = re.compile(r"^```.*?^```|(?:^(?!```).+\n)+", re.S | re.M)


def by_texts(texts: Iterable[str], *, explained: bool) -> Iterator[Setting]:
    """The settings that texts name together with what they are of, and set to something else than
    their default.

    Args:
        texts: passages of guides, or whole tests.
        explained: whether a setting in back-quotes counts, too.
    """
    for text in texts:
        words = set(WORD.findall(text))
        given: dict[str, set[str]] = defaultdict(set)
        for key, quoted, value in GIVEN.findall(text):
            given[(key or quoted).replace("-", "_")].add(value.strip(" \"'`").lower())
        told = {key.rpartition(".")[2].replace("-", "_") for key in QUOTED.findall(text)}
        named = given.keys() | (told if explained else set())
        for setting, means in ((one, names()[one]) for key in named for one in of_field(key)):
            if means & words:
                default = str(setting.config.model_fields[setting.field].get_default()).lower()
                if (explained and setting.field in told) or given[setting.field] - {default}:
                    yield setting


@cache
def in_guides() -> frozenset[Setting]:
    """What guides explain, in one paragraph, item, or block of code with what it is of."""
    pages = (file.read_text(encoding="utf-8") for file in GUIDES if file.name != "settings.md")
    return frozenset(by_texts((p for page in pages for p in PASSAGE.findall(page)), explained=True))


@cache
def in_tests() -> frozenset[Setting]:
    """What tests change, and the code of studies."""
    texts = (file.read_text(encoding="utf-8") for file in (*TESTS, *CODE))
    return frozenset(by_texts(texts, explained=False))


def unused(settings: Iterable[Setting]) -> list[str]:
    """Those of some settings that nobody uses and that have no reason."""
    used = by_experiments() | in_guides() | in_tests()
    return sorted(str(one) for one in set(settings) - used if str(one) not in WITHOUT_A_TEST)


def test_every_setting_is_used():
    assert not unused(names()), "use these settings, test what they do, or remove them"


def test_a_setting_that_nothing_sets_is_found():
    class Idle(Config):
        """Settings of a made-up component."""

        never_written_anywhere: int = 1
        """A number."""

    assert unused([Setting(Idle, "never_written_anywhere")]) == ["Idle.never_written_anywhere"]


def test_reasons_are_of_settings_that_need_one():
    used = by_experiments() | in_guides() | in_tests()
    assert set(WITHOUT_A_TEST) <= {str(setting) for setting in set(names()) - used}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"rounds": 3, "task": "ranking"}, {"Experiment.rounds"}),
        ({"model": {"factors": 3, "name": "mf"}}, {"Experiment.model", "MfConfig.factors"}),
        (
            {"privacy": {"clip-norm": 1.0, "adaptive-clip": {"quantile": 0.3}}},
            {
                "Experiment.privacy", "PrivacyConfig.clip_norm", "PrivacyConfig.adaptive_clip",
                "AdaptiveClipConfig.quantile",
            },
        ),
        (
            {"evaluation": {"every": 1, "baselines": ["ease", {"name": "ials", "factors": 8}]}},
            {"Experiment.evaluation", "EvaluationConfig.baselines", "CentralIalsConfig.factors"},
        ),
    ],
)  # fmt: skip
def test_defaults_do_not_count_as_use(table, expected):
    assert {str(setting) for setting in changed(Experiment, table)} == expected
