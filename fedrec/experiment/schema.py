# SPDX-License-Identifier: Apache-2.0
"""Experiments as strict, frozen TOML files, resolved before anything runs.

A section such as `[strategy]` names a component and carries its settings; they are checked by the
component's own configuration class. `resolve` fills in every default, so the copy in a run folder
is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedrec.components import registry
from fedrec.devices import DevicesConfig
from fedrec.experiment.sections import (
    Section,
    component_settings,
    nested_sections,
    resolved_section,
    sections_by_name,
)
from fedrec.experiment.tables import (
    TRIED,
    AdversaryConfig,
    AsynchronousConfig,
    CheckpointConfig,
    ClosingConfig,
    DataSettings,
    EarlyStoppingConfig,
    EngineConfig,
    EvaluationConfig,
    SecureAggregationConfig,
)
from fedrec.privacy.plan import PrivacyConfig


class Experiment(DataSettings):
    """Settings of an experiment."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Short name; run folders start with it. Lower-case letters, digits, '.', '_' and '-'."""
    title: str = ""
    """Title, one line."""
    paper: str = ""
    """Paper and table that the experiment reproduces."""
    settings_tried: int | None = Field(default=None, ge=1)
    """Number of settings that were tried on validation users to choose those of the federated
    system; reported in result tables, without effect on the run. Default: not stated. A table in
    `evaluation.baselines` may have the same key, for a centralised system."""
    rounds: int = Field(default=0, ge=1, le=999_999)
    """Number of training rounds (E1 in PrivRec). By default the experiment only evaluates
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
    privacy: PrivacyConfig | None = None
    """User-level differential privacy; default: none, epsilon is infinite."""
    compression: Section | None = None
    """Compression of each client's update, after its clip; default: none."""
    secure_aggregation: SecureAggregationConfig | Literal[False] | None = None
    """`true`, or a table of settings: the server sees only the sum over nodes, which mask their own
    sums; default: it sees each node's sum."""
    devices: DevicesConfig | None = None
    """Speed and availability of simulated devices; default: time is not simulated."""
    closing: ClosingConfig | None = None
    """Rounds that close before all clients have replied; default: a round waits for all."""
    asynchronous: AsynchronousConfig | None = None
    """Asynchronous rounds, which do not wait for slow devices; default: all clients of a round
    start from the same parameters."""
    early_stopping: EarlyStoppingConfig | None = None
    """Early stopping; default: none, the result has the parameters of the last round."""
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
            # validated separately, so that errors do not list all alternatives
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
        """True if the experiment has a federated system, not only centralised ones."""
        return self.rounds > 0

    @property
    def hides_cohorts(self) -> bool:
        """True if cohorts, and all data that depend on their members, are secret (privacy mode
        `secure`)."""
        return self.privacy is not None and self.privacy.mode == "secure"

    def table(self) -> dict[str, Any]:
        """The settings as a TOML table (kebab-case keys, no empty values). In an experiment without
        a federated system, its sections are left out."""
        table = {"name": self.name, **super().table()}
        unused = () if self.federated else ("rounds", *FEDERATED)
        return {key: value for key, value in table.items() if key not in unused}

    @property
    def known_cohorts(self) -> bool:
        """True if devices' speed or availability determines the participants of a round, which
        rules out privacy amplification by sampling."""
        away = self.devices is not None and self.devices.sometimes_away
        return away or self.leaves_late

    @property
    def leaves_late(self) -> bool:
        """True if rounds end without late clients, which do not count as failures."""
        return self.closing is not None or self.asynchronous is not None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Check that no two tables contradict each other."""
        federated = [key for key in FEDERATED if key.replace("-", "_") in self.model_fields_set]
        metrics = {metric.name for metric in self.evaluation.metrics or ()}
        targets = metrics & {*TARGET_METRICS, *TARGET_RATINGS}
        rules = {
            f"[{next(iter(federated), '')}] needs rounds >= 1: without rounds there is no"
            " federated system": bool(federated) and not self.federated,
            "set rounds >= 1, or name centralised systems in evaluation.baselines": (
                not self.federated and not self.evaluation.baselines
            ),
            "[early-stopping] cannot be combined with evaluation.protocol = 'reconstruction', which"
            " ranks whole histories, test rows too": (
                self.early_stopping is not None and self.evaluation.protocol == "reconstruction"
            ),
            "[compression] needs privacy.placement = 'central': a client's noise is on every"
            " value, so none can be left out": (
                self.compression is not None
                and self.privacy is not None
                and self.privacy.placement != "central"
            ),
            "[compression] and secure-aggregation cannot be combined: masks hide sums over whole"
            " tables, not the rows and scales of single clients": (
                self.compression is not None and bool(self.secure_aggregation)
            ),
            f"evaluation.metrics = [{min(targets, default='')!r}] needs the targets of [adversary]"
            " (share = 0 adds no malicious client)": (bool(targets) and self.adversary is None),
            "task = 'rating' cannot be combined with positive-above: it predicts the ratings"
            " themselves": self.task == "rating" and self.positive_above is not None,
            **self._rules_of_late_devices(),
        }
        for message, broken in rules.items():
            if broken:
                raise ValueError(message)
        return self

    def _rules_of_late_devices(self) -> dict[str, bool]:
        """Rules on late or weighted replies and on guarantees for participation, and whether each
        is violated."""
        late = self.known_cohorts
        buffered = self.asynchronous is not None
        private = self.privacy is not None
        timed = private and self.devices is not None
        return {
            "[privacy] with [devices] needs devices.examples: otherwise participation depends on"
            " a user's number of rows": (
                late and private and self.devices is not None and self.devices.examples is None
            ),
            "[devices] cannot be combined with privacy.mode = 'secure': the duration of a round"
            " reveals its participants, which must be secret": (
                timed and not late and self.hides_cohorts
            ),
            "secure-aggregation cannot be combined with [closing], [asynchronous] or device"
            " availability: its masks only cancel if all nodes of a session reply": (
                bool(self.secure_aggregation) and late
            ),
            "[asynchronous] cannot be combined with [closing]: a round ends when its buffer is"
            " full, and no reply is too late": buffered and self.closing is not None,
            "[asynchronous] needs sampler.name = 'fixed-size': the size of the cohort is the size"
            " of its buffer": buffered and self.sampler.name != "fixed-size",
            "[asynchronous] cannot be combined with privacy.placement = 'distributed': the weights"
            " of stale replies would reduce the clients' shares of the noise": (
                buffered and self.privacy is not None and self.privacy.placement == "distributed"
            ),
        }

    @field_validator("callbacks", mode="before")
    @classmethod
    def _callbacks_by_name(cls, value: Any) -> Any:
        return sections_by_name(value)

    def resolve(self) -> Experiment:
        """Check every section by its component, and fill in every default.

        Raises:
            ExperimentError: a component or one of its settings is unknown or wrong.
        """
        sections = {}
        for kind in SECTIONS if self.federated else CENTRAL_SECTIONS:
            sections[kind.name] = resolved_section(kind, getattr(self, kind.name), seed=self.seed)
        if self.callbacks is not None:
            sections["callbacks"] = tuple(
                resolved_section(registry.CALLBACK, callback, at=f"callbacks.{number}")
                for number, callback in enumerate(self.callbacks)
            )
        for kind in (registry.PERTURBATION, registry.COMPRESSION):
            section = getattr(self, kind.key)
            if section is not None:
                sections[kind.key] = resolved_section(kind, section, seed=self.seed)
        if self.adversary is not None:
            sections |= self._of_adversary(self.adversary)
        if self.privacy is not None and self.federated:
            sections["privacy"] = self.privacy.resolved()
        resolved = self.model_copy(update=sections)
        if self.federated:
            component_settings(registry.STEP, resolved.fine_tune_step(), at=FINE_TUNE)
        for section in resolved.evaluation.metrics or ():
            component_settings(registry.METRIC, section, at=f"evaluation.metrics.{section.name}")
        for name, options in resolved.evaluation.baseline_settings().items():
            section = Section.model_validate({"name": name, **options})
            component_settings(registry.BASELINE, section, at=f"baselines.{name}")
        return resolved

    def _of_adversary(self, adversary: AdversaryConfig) -> dict[str, Any]:
        """Resolve the section, and add the metrics of its targets to the evaluation."""
        attack = resolved_section(registry.POISONING, adversary.attack, seed=self.seed)
        metrics = self.evaluation.metrics or ()
        wanted = TARGET_METRICS if self.task == "ranking" else TARGET_RATINGS
        missing = set(wanted) - {metric.name for metric in metrics}
        if self.evaluation.protocol is None:
            metrics = (*metrics, *(Section(name=name) for name in wanted if name in missing))
        return {
            "adversary": adversary.model_copy(update={"attack": attack}),
            "evaluation": self.evaluation.model_copy(update={"metrics": metrics or None}),
        }

    def fine_tune_step(self) -> Section:
        """Return the local step with the settings of on-device fine-tuning."""
        return Section.model_validate(
            {"name": self.step.name, **self.step.options, **self.evaluation.fine_tune}
        )

    def steps(self) -> dict[str, Section]:
        """All local steps that orders may name, by key: the step of the experiment and those of its
        strategy."""
        nested = nested_sections(self.settings(registry.STRATEGY))
        inner = {f"strategy.{key}": step for key, kind, step in nested if kind is registry.STEP}
        return {"step": self.step, **inner}

    def toml(self) -> str:
        """Return the experiment as TOML text."""
        import tomli_w

        return tomli_w.dumps(self.table())

    def digest(self) -> str:
        """SHA-256 of the settings, without the number of settings tried."""
        table = _untold(self.table())
        evaluation = dict(table.get("evaluation", {}))
        if "baselines" in evaluation:
            evaluation["baselines"] = [_untold(entry) for entry in evaluation["baselines"]]
            table["evaluation"] = evaluation
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _untold(table: Any) -> Any:
    """Remove the number of settings tried from a table, and reduce it to the name if no other key
    remains; return other values unchanged."""
    if not isinstance(table, dict) or TRIED not in table:
        return table
    rest = {key: value for key, value in table.items() if key != TRIED}
    return rest["name"] if rest.keys() == {"name"} else rest


FINE_TUNE = "evaluation.fine-tune"
"""Key of the settings of on-device fine-tuning."""
SECTIONS = (
    registry.DATASET,
    registry.SPLIT,
    registry.MODEL,
    registry.STEP,
    registry.STRATEGY,
    registry.SAMPLER,
)
CENTRAL_SECTIONS = (registry.DATASET, registry.SPLIT)
TARGET_METRICS = ("exposure", "target-ndcg", "target-rank")
"""Metrics of the targets of an adversary, which an experiment with `[adversary]` always has."""
TARGET_RATINGS = ("target-rating",)
"""Metrics of targets for predicted ratings."""
FEDERATED = (
    *(kind.name for kind in SECTIONS if kind not in CENTRAL_SECTIONS),
    "privacy",
    "compression",
    "secure-aggregation",
    "devices",
    "closing",
    "asynchronous",
    "early-stopping",
)
"""Keys of an experiment that only a federated system uses."""


# Warnings of a run whose clients' negatives reveal the held-out items.
#
# The leak needs no model: an item that a user never draws as a negative, and that is not a training
# positive, is a held-out one. If items are ranked by how rarely they were drawn, held-out items are
# first after some rounds.


def _leaks(experiment: Experiment) -> bool:
    """True if held-out items are excluded from the clients' negatives."""
    return bool(experiment.split.options.get("leaky-negatives", False))


def marked(experiment: Experiment) -> str:
    """Return the experiment's name for tables, marked if it has the leak."""
    return f"{experiment.name} [leak]" if _leaks(experiment) else experiment.name


def leak_words(experiment: Experiment) -> list[str]:
    """Warnings of the leak for a result, one paragraph each; none without a leak."""
    if not _leaks(experiment):
        return []
    return [
        "LEAK: split.leaky-negatives excluded held-out items from the clients' negatives, so that"
        " they can be identified without a model. These figures do not measure the quality of"
        " recommendations."
    ]
