# SPDX-License-Identifier: Apache-2.0
"""Experiments as strict, frozen TOML files, resolved before anything runs, and their loading.

A section such as `[strategy]` names a component and carries its settings; they are checked by the
component's own configuration class. `resolve` fills in every default, so the copy in a run folder
is complete."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from fedrec.components import registry
from fedrec.components.sections import (
    Named,
    Section,
    component_settings,
    nested_sections,
    override,
    resolved_section,
)
from fedrec.config import Config
from fedrec.devices import DevicesConfig
from fedrec.errors import ExperimentError, unknown
from fedrec.privacy.plan import PrivacyConfig
from fedrec.runtime.files import parse_json, read_toml

Masked: TypeAlias = Literal["real", "learned", "both"]
Precision: TypeAlias = Literal["float32", "bf16"]
_ROUNDING = 1e-9  # of products of shares and numbers of clients
TRIED = "settings-tried"
"""Key of the number of settings tried to choose those of a system."""


class AdversaryConfig(Config):
    """Adversary with malicious clients among the training clients, for simulations only. They are
    added to the honest clients; sampler, clip and noise treat them alike, and the guarantee of
    `[privacy]` is for the honest clients, computed as if there were no others."""

    attack: Annotated[Named, registry.POISONING]
    """Attack: a name, or a table with settings."""
    share: float = Field(default=0.01, ge=0, le=1)
    """Number of malicious clients as a share of the honest training clients, at least one; 0: no
    malicious clients, only the targets are measured."""
    targets: int = Field(default=1, ge=1)
    """Number of promoted items, those with the fewest training rows; at most the number of
    items."""
    public_share: float = Field(default=0.01, ge=0, le=1)
    """Share of each honest client's training rows that the adversary knows, rounded up; it derives
    the items' popularity from these rows. 0: none, 1: all."""

    def number_among(self, honest: int) -> int:
        """Number of malicious clients for a number of honest ones."""
        return max(1, int(self.share * honest + 1e-9)) if self.share else 0


class DataSettings(Config):
    """Settings of an experiment that the clients' data depend on: dataset, split, perturbation,
    adversary, seed and task."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random streams."""
    split_seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the split, so that runs with different seeds hold out the same rows; default:
    `seed`."""
    task: Literal["ranking", "rating"] = "ranking"
    """`ranking`: implicit feedback, sigmoid and cross-entropy; `rating`: explicit ratings, linear
    and squared error."""
    positive_above: float | None = None
    """Rows with a rating above this are positive; default: all rows are positive."""
    dataset: Section
    """Dataset and the options of its reader."""
    split: Section = Section(name="user-holdout")
    """Training and held-out rows."""
    perturb: Section | None = None
    """Perturbation of the training rows before training; default: none."""
    adversary: AdversaryConfig | None = None
    """Malicious clients, in simulations; default: none."""

    @model_validator(mode="after")
    def _adversary_alone(self) -> Self:
        if self.adversary is not None and self.perturb is not None:
            raise ValueError("[adversary] without [perturb], which malicious clients would ignore")
        return self

    @property
    def seed_of_split(self) -> int:
        """Seed of the split."""
        return self.seed if self.split_seed is None else self.split_seed

    def settings(self, kind: registry.Kind) -> Any:
        """Settings of the component in the section of that kind: its `Config`, or keyword arguments
        if it has none."""
        return component_settings(kind, getattr(self, kind.key))


class _ShownConfig(Config):
    """Keys of a baseline's table that serve result tables alone."""

    label: str | None = Field(default=None, pattern=r"^[^/]*[^/ .][^/]*$")
    """Name in result tables, such as "dp-gram-5", without '/', as it also names a folder."""
    settings_tried: int | None = Field(default=None, ge=1)
    """Number of settings that were tried on validation users."""


_SHOWN_ONLY = ("label", TRIED)


class EvaluationConfig(Config):
    """Settings of the evaluation."""

    held_out: Literal["test", "validation"] = "test"
    """Held-out rows to evaluate: `validation` for tuning, `test` for reporting."""
    protocol: Literal["reconstruction"] | None = None
    """Default: ranking of held-out items, without known ones. `reconstruction`: the whole catalogue
    is ranked against the whole history, most of which is the model's input; this does not measure
    recommendation, and its metrics have different names."""
    masked: Masked = "real"
    """Known items that are excluded from whole lists (recall, precision, ndcg, mrr) if
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
    """Cut-offs of the ranking metrics, without duplicates."""
    fine_tune: dict[str, Any] = Field(default_factory=lambda: {"epochs": 0})
    """Settings of the local step that differ in on-device fine-tuning; `epochs = 0` evaluates the
    shared model."""
    sampled_items: int | None = Field(default=None, ge=1)
    """Also rank each held-out positive among this number of sampled unseen items (99 in NCF), in
    expectation: metrics `hits-of-100@k` and `ndcg-of-100@k`. Default: no sampled metrics."""
    metrics: tuple[Named, ...] | None = None
    """Metrics in addition to those of the task: names, or tables with settings; default: none."""
    shown: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Metrics of the printed table, such as `recall@20`; files contain all metrics. Default, also
    if the experiment has none of these: hit rates and NDCG@10, or errors of ratings."""
    baselines: tuple[str | Section, ...] = ("popularity", "ease")
    """Centralised recommenders to evaluate under the same protocol: names, or tables with settings
    such as `{ name = "dp-popularity", epsilon = 5.0 }`; a `label` names one in result tables, so
    that a baseline can occur with several settings. `settings-tried` is the number of settings
    tried to choose them."""

    @field_validator("ks", mode="after")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("duplicate cut-offs")
        return value

    def baseline_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of each baseline by its label (default: its name), with `name` if the label
        differs.

        Raises:
            ExperimentError: a label is duplicate or not a text, or `settings-tried` is no number.
        """
        return {label: _named(section, label) for label, section in self._labelled().items()}

    def settings_tried(self) -> dict[str, int | None]:
        """Number of settings tried for each baseline, by label; None if not stated."""
        return {label: entry.options.get(TRIED) for label, entry in self._labelled().items()}

    def _labelled(self) -> dict[str, Section]:
        """The baselines by their labels."""
        sections = [
            Section(name=entry) if isinstance(entry, str) else entry for entry in self.baselines
        ]
        for section in sections:
            shown = {key: value for key, value in section.options.items() if key in _SHOWN_ONLY}
            _ShownConfig.parse(shown, at=f"baselines.{section.name}")
        labels = [section.options.get("label", section.name) for section in sections]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ExperimentError(
                f"duplicate baseline {twice[0]!r}",
                got=", ".join(labels),
                fix=f"remove one, or give it a label: {{ name = {twice[0]!r}, label = '...' }}",
            )
        return dict(zip(labels, sections, strict=True))


def _named(section: Section, label: str) -> dict[str, Any]:
    """Settings of a baseline, including its name if the label differs."""
    settings = {key: value for key, value in section.options.items() if key not in _SHOWN_ONLY}
    return settings if label == section.name else {"name": section.name, **settings}


class EngineConfig(Config):
    """Settings of the engine that runs the clients. Only `precision` affects the results (up to the
    order of summation)."""

    name: Literal["serial", "ray", "flower"] = "serial"
    """`serial`: in this process; `ray`: Ray actors, and on one machine without GPUs this process
    for the first node, without Ray if it is the only one; `flower`: Flower's simulation through
    `flwr run`."""
    nodes: int | None = Field(default=None, ge=1, le=4096)
    """Number of nodes that host the clients; default: 1 for serial; one per core (or GPU)
    otherwise, on Ray on this machine without GPUs at most one per 8 clients of a cohort, and one
    for fewer than 20 rounds."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`."""
    precision: Precision = "float32"
    """Precision of matrix products in local training: `float32`, or `bf16` on CUDA; parameters and
    sums stay float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per node; default: 1, because the batches of one client are too small for several
    threads. With centralised systems only, the default is one per core, at most OMP_NUM_THREADS;
    their gradient steps take one, unless each is very large."""
    path: Literal["auto", "kernel", "blocks", "reference"] = "auto"
    """Training path; results are equal up to rounding. `kernel`: native code, an error if step or
    model do not support it; `blocks`: many clients at once by autograd; `reference`: one client at
    a time; `auto`: the fastest supported path."""
    memory_gib: float = Field(default=1.0, gt=0)
    """Memory in GiB that a node may use for the clients that it trains at once."""
    ray_address: str | None = None
    """Address of a running Ray cluster; default: a local one is started."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for the replies of a round."""
    max_failures: float = Field(default=0.0, ge=0, le=1)
    """Largest tolerated share of failed replies in a round; if exceeded, the run stops with the
    first client error."""

    @property
    def actors(self) -> int:
        """Number of nodes that are Ray actors, the last ones."""
        if self.name != "ray":
            return 0
        here = self.ray_address is None and self.device == "cpu"
        return (self.nodes or 1) - here


class CheckpointConfig(Config):
    """Settings of checkpoints."""

    every: int = Field(default=1, ge=1)
    """Number of rounds between checkpoints (another follows the last round)."""
    keep: int = Field(default=3, ge=2)
    """Number of checkpoints to retain; at least 2, in case the newest one is damaged."""


class EarlyStoppingConfig(Config):
    """Early stopping: end training when a metric of validation users, a fixed sample of at most
    1,000, no longer improves, and use the best parameters (Prechelt 1998).

    The metric is always one of validation users, independently of `evaluation.held-out`, because
    parameters selected on test users could not be evaluated on them.
    """

    metric: str | None = None
    """Metric of held-out rows, such as `ndcg@10`; default: `hits@10`, or the first hit rate of
    `evaluation.ks`; `rmse` for ratings."""
    patience: int = Field(default=10, ge=1)
    """Number of evaluations without improvement after which training ends, counted in the
    strategy's last phase."""
    min_improvement: float = Field(default=0.0, ge=0)
    """Smallest improvement over the best evaluation so far, in units of the metric; 0: any
    improvement counts."""


class SecureAggregationConfig(Config):
    """Settings of secure aggregation; `secure-aggregation = true` means the defaults."""

    threshold: float = Field(default=2 / 3, gt=0.5, le=1)
    """Share of a round's nodes that must remain until its sum is unmasked, and that would have to
    collude with the server to unmask a node; more than half, so that the server cannot send
    different values to two groups of nodes."""
    least_nodes: int = Field(default=2, ge=2)
    """Smallest number of nodes in a sum, independently of the share; with two, each of them can
    subtract its own contribution."""
    largest: float = Field(default=2.0**20, gt=0)
    """Largest absolute value in a node's sum of updates, which determines the fixed-point
    precision. Under differential privacy it follows from the clip norm and the noise, and this
    setting is ignored."""

    def quorum(self, nodes: int) -> int:
        """Number of nodes needed to unmask a sum of the given nodes; may exceed their number."""
        return max(math.ceil(self.threshold * nodes), nodes // 2 + 1, self.least_nodes)


class ClosingConfig(Config):
    """Deadlines of rounds. Later replies are dropped. In a simulation, devices reply after the
    times of `[devices]`."""

    deadline: float | None = Field(default=None, gt=0)
    """Seconds after which a round closes, simulated ones in a simulation; default: none in a
    simulation, and `engine.timeout` with real nodes."""
    over_selection: float = Field(default=1.0, ge=1, le=10)
    """Over-selection: factor by which more clients than the cohort are selected; with 1.3 and a
    cohort of 100, 130 are selected and the first 100 replies are used."""

    def asked(self, cohort: float) -> float:
        """Number of clients to select for a (mean) cohort size; a whole number for a whole size."""
        more = self.over_selection * cohort
        return math.ceil(more - _ROUNDING) if isinstance(cohort, int) else more

    def needed(self, asked: int) -> int:
        """Number of replies that close a round with `asked` selected clients; at least one, even if
        a random cohort has a single client."""
        return max(1, math.floor(asked / self.over_selection + _ROUNDING))


class AsynchronousConfig(Config):
    """Buffered asynchronous aggregation (FedBuff, Nguyen et al. 2022): a round ends when the number
    of replies reaches the size of the sampler's cohort, and each client that replied is replaced
    immediately, without waiting for slow devices (see `[devices]`). For simulations only."""

    concurrency: int = Field(ge=1)
    """Number of clients that train concurrently."""


# The experiment, with all of its tables.


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
    callbacks: tuple[Named, ...] | None = None
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
        away = self.devices is not None and self.devices.nightly is not None
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
TARGET_METRICS = ("exposure", "target-rank")
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


# Loading of experiments from TOML files, by name, and from Flower's run configuration.


def load(
    source: str | Path | Mapping[str, Any] | Experiment, overrides: Iterable[str] = ()
) -> Experiment:
    """Read, override, check and resolve an experiment.

    Args:
        source: a TOML file, the name of a shipped experiment, a table, or an experiment.
        overrides: texts such as `"strategy.server-lr=0.5"`; values in TOML syntax, bare words are
            strings.

    Raises:
        ExperimentError: the file is missing or not TOML, or a key or value is wrong.
    """
    texts = list(overrides)
    if isinstance(source, Experiment):
        if not texts:
            return source.resolve()
        source = source.table()
    return Experiment.parse(read(source, texts)).resolve()


def read(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the table of an experiment with overrides, not validated and without defaults.

    Args:
        source: a TOML file, the name of a shipped experiment, or a table.
        overrides: see `load`.

    Raises:
        ExperimentError: the file is missing or not TOML, or an override cannot be read.
    """
    table = dict(source) if isinstance(source, Mapping) else _read(source)
    for text in overrides:
        table = override(table, text)
    return table


def from_run_config(run_config: Mapping[str, Any]) -> Experiment:
    """Load the experiment that a Flower run configuration names.

    Keys: `resolved` (a whole experiment as JSON, from fedrec's engines), or `experiment` (a TOML
    file or the name of a shipped experiment) and `overrides` (like `--set`, separated by `;`).

    Raises:
        ExperimentError: the experiment is missing or invalid.
    """
    if run_config.get("resolved"):
        return Experiment.parse(parse_json(str(run_config["resolved"])))
    if not run_config.get("experiment"):
        fix = "flwr run . --run-config 'experiment=\"privrec-synthetic\"' (or an absolute path)"
        raise ExperimentError("the run configuration names no experiment", fix=fix)
    overrides = [part for part in str(run_config.get("overrides", "")).split(";") if part.strip()]
    return load(str(run_config["experiment"]), overrides)


def shipped_experiments() -> dict[str, Path]:
    """Files of the experiments shipped with fedrec, by name."""
    folder = Path(__file__).resolve().parents[2] / "simulations" / "experiments"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def _read(source: str | Path) -> dict[str, Any]:
    if not isinstance(source, str | Path):
        raise ExperimentError(
            "the experiment is missing",
            expected="a TOML file, the name of a shipped experiment, a table, or an Experiment",
            got=repr(source)[:200],
            fix="fedrec.run('privrec-synthetic'), or fedrec.try_table for a DataFrame",
        )
    try:
        path = Path(source).expanduser()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, zero byte or unknown home folder
        path = Path()
        exists = False
    if not exists:
        shipped = shipped_experiments()
        if str(source) not in shipped:
            expected = "a TOML file, or the name of a shipped experiment"
            raise unknown("experiment", str(source)[:200], shipped, expected)
        path = shipped[str(source)]
    return read_toml(path, ExperimentError)
