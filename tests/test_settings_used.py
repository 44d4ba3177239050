# SPDX-License-Identifier: Apache-2.0
"""Every setting serves somebody: a shipped experiment, a study, an example or a block of code in
the documentation gives it a value other than its default, or users need it for data and machines of
their own, or tune it. A test that sets it does not count. One that serves nobody is removed."""

import json
import re
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from pydantic_core import to_jsonable_python

from clients.device.policy import Policy
from fedrec.components import registry
from fedrec.components.sections import Section
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import EvaluationConfig, Experiment, read, shipped_experiments
from fedrec.privacy.plan import PrivacyConfig
from fedrec.runtime.files import read_toml
from simulations.deployment.layout import DeploymentConfig
from simulations.studies.declaration import declared

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))["SECTIONS"]
GUIDES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.md")]
NOTEBOOKS = [*(ROOT / "docs").rglob("*.ipynb")]
CODE = [
    *(file for file in (ROOT / "benchmarks").rglob("*.py") if ".venvs" not in file.parts),
    *(ROOT / "simulations/reproduce").rglob("*.py"),
]
STUDIES = [ROOT / "simulations/reproduce/papers", ROOT / "benchmarks"]
OTHER = {"node": Policy, "deployment": DeploymentConfig}  # by their files
# columns, paths, addresses and limits of a user's own data and machines
OF_OWN_DATA = {
    "DeploymentConfig": "bind hosts local_nodes most_clients "
    "node_port nodes port revoked superlink_port",
    "EngineConfig": "ray_address",
    "Experiment": "early_stopping",
    "MeansStartConfig": "scale",
    "MlflowConfig": "experiment tracking_uri",
    "PnbmConfig": "scale",
    "Policy": "least_noise most_epsilon most_evaluations most_rounds plugins reply_interval",
    "PriorsConfig": "features noise sha256 source words",
    "RatingSumsConfig": "scale",
    "ReaderConfig": "item_vectors items_without_vector path verify",
    "ScaleConfig": "scale",
    "TableConfig": "header item item_features item_texts rating "
    "separator time time_format user user_categories user_features",
    "TensorBoardConfig": "folder",
    "UserHoldoutConfig": "halves",
}
# sizes and rates that users tune, and where noise is added (docs/privacy.md)
# sizes and rates that users tune
TUNED = {
    "AdversaryConfig": "targets",
    "AttributeConfig": "folds",
    "BiasedMfConfig": "factors",
    "ChoiceConfig": "malicious",
    "DataSettings": "split_seed",
    "DevicesConfig": "example_seconds megabyte_seconds",
    "DpAlsConfig": "regularisation",
    "DpFoldInConfig": "factors",
    "DpGramConfig": "regularisation",
    "DpItemMeanConfig": "delta user_damping",
    "DpMfConfig": "factors learning_rate regularisation",
    "DpSgdConfig": "private_rate",
    "DpsgdMfConfig": "factors regularisation",
    "DpsgdPnbmConfig": "minimum_ratings",
    "DpSvdConfig": "user_regularisation",
    "FedgnnConfig": "embedding",
    "FedgnnStepConfig": "clip_norm",
    "FedgnnStrategyConfig": "history neighbours",
    "FoldInConfig": "factors",
    "GfCfConfig": "factors",
    "GlobalTimeConfig": "test",
    "GpfedrecConfig": "embedding hidden",
    "GpfedrecStepConfig": "pull user_rate",
    "GradientConfig": "proximal_mu",
    "Gru4RecConfig": "layers",
    "IalsConfig": "spread",
    "ItemEmbeddingConfig": "embedding",
    "KfoldConfig": "folds",
    "LightgcnConfig": "factors layers",
    "LiraConfig": "shadows",
    "MamlConfig": "learning_rate",
    "MetaMfConfig": "embedding hidden user",
    "NeumfConfig": "tower",
    "NightlyConfig": "hours spread start",
    "NoisyCooccurrenceConfig": "delta",
    "PersonalNoise": "budget_seed",
    "PnbmStepConfig": "learning_rate",
    "PoissonConfig": "cohort",
    "PrivacyConfig": "max_dropouts placement",
    "PrivateConfig": "delta seed",
    "PrivateParameters": "private_std",
    "RatioConfig": "test validation",
    "RecencyConfig": "decay",
    "SampledListsConfig": "items",
    "SasRecConfig": "blocks",
    "SequenceConfig": "width",
    "SessionConfig": "hidden lambda_im",
    "SvdConfig": "factors regularisation",
    "TopKConfig": "bits",
    "TransitionsStrategyConfig": "factors",
    "TrimmedMeanConfig": "cut",
    "UserHoldoutConfig": "test_users",
    "VaeConfig": "dropout",
    "VaeStepConfig": "learning_rate",
}


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
    yield from SECTIONS.items()
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
            for key in config.model_fields:  # the key stands at the top level, beside `rounds`
                found[declaration(config, key)].update({"rounds", key.replace("_", "-")})
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
        for kind in (registry.ATTACK, registry.BASELINE, registry.MODEL, registry.SPLIT):
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
OPTION = re.compile(r"--([a-z][\w-]*)(?:[ =](?!-)(\S+))?")
BLOCK = re.compile(r"^ *```.*?^ *```", re.S | re.M)


def by_texts(texts: Iterable[str]) -> Iterator[Setting]:
    """The settings that texts set, also by an option of a command, to something else than their
    default, and of which they name the component or the table."""
    for text in texts:
        words = set(WORD.findall(text))
        given: dict[str, set[str]] = defaultdict(set)
        for key, quoted, value in GIVEN.findall(text):
            given[(key or quoted).replace("-", "_")].add(value.strip(" \"'`").lower())
        for key, value in OPTION.findall(text):
            given[key.replace("-", "_")].add(value.strip("\"'").lower() or "true")
        for setting, means in ((one, names()[one]) for key in given for one in of_field(key)):
            default = str(setting.config.model_fields[setting.field].get_default()).lower()
            if means & words and given[setting.field] - {default}:
                yield setting


@cache
def in_blocks() -> frozenset[Setting]:
    """What blocks of code in the documentation set: in one block, with what it is of."""
    pages = (file.read_text(encoding="utf-8") for file in GUIDES if file.name != "settings.md")
    cells = (
        "".join(cell["source"])
        for file in NOTEBOOKS
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    )
    return frozenset(by_texts([*cells, *(b for page in pages for b in BLOCK.findall(page))]))


@cache
def by_code() -> frozenset[Setting]:
    """What the code of studies sets."""
    return frozenset(by_texts(file.read_text(encoding="utf-8") for file in CODE))


def unused(settings: Iterable[Setting]) -> set[str]:
    """Those of some settings that nobody sets and that users do not need for their own data."""
    used = by_experiments() | in_blocks() | by_code()
    return {str(one) for one in set(settings) - used} - full_names(OF_OWN_DATA) - full_names(TUNED)


def full_names(fields: Mapping[str, str]) -> set[str]:
    """`Class.field` of each field of each class."""
    return {f"{config}.{field}" for config, own in fields.items() for field in own.split()}


def test_every_setting_is_used():
    idle = sorted(unused(names()))
    assert not idle, f"set by nobody: {', '.join(idle)}; use them in an experiment, or remove them"


def test_a_setting_that_is_gone_leaves_the_lists():
    gone = (full_names(OF_OWN_DATA) | full_names(TUNED)) - {str(setting) for setting in names()}
    assert not gone, f"take away from OF_OWN_DATA or TUNED: {', '.join(sorted(gone))}"


def test_a_setting_that_nothing_sets_is_found():
    class Idle(Config):
        """Settings of a made-up component."""

        never_written_anywhere: int = 1
        """A number."""

    assert unused([Setting(Idle, "never_written_anywhere")]) == {"Idle.never_written_anywhere"}


@pytest.mark.parametrize(
    ("text", "is_set"),
    [
        ("fedrec attack audit e.toml --canaries 3", True),
        ("the audit has `canaries`", False),
        ("fedrec attack lira e.toml --canaries 3", False),
    ],
)
def test_a_block_sets_what_it_names_with_its_component(text, is_set):
    assert ("AuditConfig.canaries" in map(str, by_texts([text]))) == is_set


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"rounds": 3, "task": "ranking"}, {"Experiment.rounds"}),
        (
            {"evaluation": {"every": 1, "baselines": ["ease", {"name": "ials", "factors": 8}]}},
            {"Experiment.evaluation", "EvaluationConfig.baselines", "CentralIalsConfig.factors"},
        ),
    ],
)
def test_defaults_do_not_count_as_use(table, expected):
    assert {str(setting) for setting in changed(Experiment, table)} == expected
