# SPDX-License-Identifier: Apache-2.0
"""One TOML file is one whole experiment: strict, frozen, resolved before anything runs.

A section such as `[strategy]` names a component and carries its settings; they are checked by the
component's own configuration class. `resolve` fills in every default, so the copy in a run folder
is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.data_settings import DataSettings
from fedrec.experiment.early_stopping import EarlyStoppingConfig
from fedrec.experiment.engine import EngineConfig
from fedrec.experiment.sections import (
    Section,
    component_settings,
    nested_sections,
    resolved_section,
)
from fedrec.experiment.secure_aggregation import SecureAggregationConfig
from fedrec.privacy.config import PrivacyConfig

Masked: TypeAlias = Literal["real", "learned", "both"]


class EvaluationConfig(Config):
    """Evaluation of the system."""

    held_out: Literal["test", "validation"] = "test"
    """Held-out rows to evaluate: `validation` for tuning, `test` for reporting."""
    protocol: Literal["reconstruction"] | None = None
    """Default: ranking of held-out items, without known ones. `reconstruction`: the whole catalogue
    is ranked against the whole history, most of which is the model's input; this does not measure
    recommendation, and its metrics have different names."""
    masked: Masked = "real"
    """Known items that are excluded from whole lists (recall, precision, ndcg-list, mrr) if
    training rows are perturbed: those of the `real` training rows, of the perturbed ones
    (`learned`), or of `both`. Held-out items that are excluded count as misses."""
    every: int = Field(default=1, ge=0)
    """Number of rounds between evaluations on a sample of users; 0: only after the last round."""
    users: int = Field(default=200, ge=1)
    """Number of held-out users in evaluations during training (a fixed sample)."""
    final_users: int | None = Field(default=None, ge=1)
    """Number of held-out users in the final evaluation and in that of the baselines; default:
    all."""
    ks: tuple[Annotated[int, Field(ge=1, le=10**6)], ...] = Field(
        default=(5, 10, 20, 30), min_length=1
    )
    """Cut-offs of the ranking metrics, each of them once."""
    fine_tune: dict[str, Any] = Field(default_factory=lambda: {"epochs": 0})
    """Settings of the local step that differ in on-device fine-tuning; `epochs = 0` evaluates the
    shared model."""
    sampled_items: int | None = Field(default=None, ge=1)
    """Also rank each held-out positive among this number of sampled unseen items (99 in NCF), in
    expectation: metrics `hits-of-100@k` and `ndcg-of-100@k`. Default: no sampled metrics."""
    metrics: tuple[Section, ...] | None = None
    """Metrics in addition to those of the task: names, or tables with settings; default: none."""
    inactive_below: int = Field(default=20, ge=0)
    """Users with fewer known interactions than this form the group `inactive`."""
    baselines: tuple[str | Section, ...] = ("popularity", "ease")
    """Centralised recommenders to evaluate under the same protocol: names, or tables with settings
    such as `{ name = "dp-popularity", epsilon = 5.0 }`; a `label` names one in result tables, so
    that a baseline can occur with several settings."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics_by_name(cls, value: Any) -> Any:
        return _by_name(value)

    @field_validator("ks", mode="after")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("cut-offs that differ from each other")
        return value

    def baseline_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of each baseline by its label, which is its name unless it has another; then
        `name` is among them.

        Raises:
            ExperimentError: two baselines have the same label, or a label is not text.
        """
        sections = [
            Section(name=entry) if isinstance(entry, str) else entry for entry in self.baselines
        ]
        labels = [section.options.get("label", section.name) for section in sections]
        for label in labels:
            if not isinstance(label, str) or not label.strip(" .") or "/" in label:
                raise ExperimentError(
                    "wrong label in evaluation.baselines",
                    expected="a text without '/', which is also the name of a folder",
                    got=repr(label),
                    fix='{ name = "dp-gram", label = "dp-gram-5", epsilon = 5.0 }',
                )
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ExperimentError(
                f"baseline {twice[0]!r} is named twice",
                expected="distinct names, or labels, in evaluation.baselines",
                got=", ".join(labels),
                fix=f"leave one out, or give it a label: {{ name = {twice[0]!r}, label = '...' }}",
            )
        return {
            label: _named(section, label) for section, label in zip(sections, labels, strict=True)
        }


def _named(section: Section, label: str) -> dict[str, Any]:
    """A baseline's settings, including its name if the label differs."""
    settings = {key: value for key, value in section.options.items() if key != "label"}
    return settings if label == section.name else {"name": section.name, **settings}


def _by_name(value: Any) -> Any:
    """A list of sections, in which a name alone is a section without settings."""
    if not isinstance(value, list | tuple):
        return value
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in value)


class CheckpointConfig(Config):
    """Checkpoints of the state."""

    every: int = Field(default=1, ge=1)
    """Save after every so many rounds (and after the last)."""
    keep: int = Field(default=3, ge=2)
    """Number of checkpoints to keep; at least 2, in case the newest one is damaged."""


class Experiment(DataSettings):
    """A whole experiment."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Short name; run folders start with it. Lower-case letters, digits, '.', '_' and '-'."""
    title: str = ""
    """Title, one line."""
    paper: str = ""
    """Paper and table that the experiment reproduces."""
    rounds: int = Field(default=0, ge=1, le=999_999)
    """Number of training rounds (E1 in PrivRec). Without it the experiment only evaluates
    `evaluation.baselines`, without a federated system and its tables, such as `[model]`."""
    model: Section = Section(name="privrec")
    """The recommender."""
    step: Section = Section(name="sgd")
    """Local training of a client."""
    strategy: Section = Section(name="reptile")
    """Aggregation on the server; also Flower's strategies, such as
    `flwr.serverapp.strategy:FedAdam`."""
    sampler: Section = Section(name="fixed-size")
    """Sampling of the cohort of a round."""
    callbacks: tuple[Section, ...] | None = None
    """Callbacks that observe the run and may end it: names, or tables with settings; default:
    none."""
    train_config: dict[str, str | float | int | bool] | None = None
    """Additional entries of `config` for nodes with another Flower ClientApp, such as `lr`;
    default: none."""
    privacy: PrivacyConfig | None = None
    """User-level differential privacy; default: none, epsilon is infinite."""
    secure_aggregation: SecureAggregationConfig | Literal[False] | None = None
    """`true`, or a table of settings: the server sees only the sum over nodes, which mask their own
    sums; default: it sees each node's sum."""
    early_stopping: EarlyStoppingConfig | None = None
    """Early stopping; default: none, and the parameters of the last round are kept."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation."""
    engine: EngineConfig = EngineConfig()
    """Engine."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any], *, at: str = "") -> Self:
        """Validate `settings`; `at` is the full key of the table they came from. A section without
        a name uses the default component, so `--set step.epochs=1` works."""
        table = dict(settings)
        for key in ("secure-aggregation", "secure_aggregation"):
            if table.get(key) is True:
                table[key] = {}
            # validated separately, so that errors do not list the alternatives
            if isinstance(table.get(key), Mapping):
                table[key] = SecureAggregationConfig.parse(
                    table[key], at="secure-aggregation"
                ).table()
        for key, field in cls.model_fields.items():
            given = table.get(key)
            if (
                isinstance(field.default, Section)
                and isinstance(given, Mapping)
                and "name" not in given
            ):
                table[key] = {"name": field.default.name, **given}
        return super().parse(table, at=at)

    @property
    def federated(self) -> bool:
        """Whether there is a federated system, or only centralised ones."""
        return self.rounds > 0

    def table(self) -> dict[str, Any]:
        """The settings as a TOML table (kebab-case keys, no empty values). In an experiment without
        a federated system, its sections are left out."""
        table = {"name": self.name, **super().table()}
        unused = () if self.federated else ("rounds", *FEDERATED)
        return {key: value for key, value in table.items() if key not in unused}

    @model_validator(mode="after")
    def _requires_rounds_or_baselines(self) -> Self:
        given = [key for key in FEDERATED if key.replace("-", "_") in self.model_fields_set]
        if not self.federated and given:
            raise ValueError(
                f"rounds = 1 or more with [{given[0]}]; without rounds there is no federated system"
            )
        if not self.federated and not self.evaluation.baselines:
            raise ValueError("rounds = 1 or more, or centralised systems in evaluation.baselines")
        return self

    @model_validator(mode="after")
    def _watches_held_out_rows_alone(self) -> Self:
        if self.early_stopping is not None and self.evaluation.protocol == "reconstruction":
            raise ValueError(
                "[early-stopping] without evaluation.protocol = 'reconstruction', which ranks whole"
                " histories, test rows too"
            )
        return self

    @model_validator(mode="after")
    def _rating_has_no_threshold(self) -> Self:
        if self.task == "rating" and self.positive_above is not None:
            raise ValueError(
                "task = 'rating' without positive-above (ratings themselves are predicted)"
            )
        return self

    @field_validator("callbacks", mode="before")
    @classmethod
    def _callbacks_by_name(cls, value: Any) -> Any:
        return _by_name(value)

    def resolve(self) -> Experiment:
        """The same experiment with every section checked by its component and every default filled
        in.

        Raises:
            ExperimentError: a component or one of its settings is unknown or wrong.
        """
        sections = {}
        for kind in SECTIONS if self.federated else CENTRAL_SECTIONS:
            sections[kind.name] = resolved_section(kind, getattr(self, kind.name), seed=self.seed)
        if self.callbacks is not None:
            places = enumerate(self.callbacks)
            sections["callbacks"] = tuple(
                resolved_section(registry.CALLBACK, one, at=f"callbacks.{n}") for n, one in places
            )
        if self.perturb is not None:
            sections["perturb"] = resolved_section(
                registry.PERTURBATION, self.perturb, seed=self.seed
            )
        if self.privacy is not None and self.federated:
            sections["privacy"] = self.privacy.resolved()
        resolved = self.model_copy(update=sections)
        if self.federated:
            component_settings(registry.STEP, resolved.fine_tune_step(), at="evaluation.fine-tune")
        for section in self.evaluation.metrics or ():
            component_settings(registry.METRIC, section, at=f"evaluation.metrics.{section.name}")
        for name, options in resolved.evaluation.baseline_settings().items():
            section = Section.model_validate({"name": name, **options})
            component_settings(registry.BASELINE, section, at=f"baselines.{name}")
        return resolved

    def fine_tune_step(self) -> Section:
        """The local step with the settings of on-device fine-tuning."""
        return Section.model_validate(
            {"name": self.step.name, **self.step.options, **self.evaluation.fine_tune}
        )

    def steps(self) -> list[Section]:
        """All local steps that clients may be ordered to run: the experiment's, and those of its
        strategy."""
        nested = nested_sections(self.settings(registry.STRATEGY))
        return [self.step, *(section for kind, section in nested if kind is registry.STEP)]

    def toml(self) -> str:
        """The experiment as TOML text."""
        import tomli_w

        return tomli_w.dumps(self.table())

    def digest(self) -> str:
        """SHA-256 of the experiment: equal digests mean equal settings."""
        return hashlib.sha256(json.dumps(self.table(), sort_keys=True).encode()).hexdigest()


SECTIONS = (
    registry.DATASET,
    registry.SPLIT,
    registry.MODEL,
    registry.STEP,
    registry.STRATEGY,
    registry.SAMPLER,
)
CENTRAL_SECTIONS = (registry.DATASET, registry.SPLIT)
FEDERATED = (
    *(kind.name for kind in SECTIONS if kind not in CENTRAL_SECTIONS),
    "train-config",
    "privacy",
    "secure-aggregation",
    "early-stopping",
)
"""Keys of an experiment that only a federated system uses."""
