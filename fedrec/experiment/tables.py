# SPDX-License-Identifier: Apache-2.0
"""Tables of an experiment that do not name a component."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings, sections_by_name

Masked: TypeAlias = Literal["real", "learned", "both"]
Precision: TypeAlias = Literal["float32", "bf16"]
_ROUNDING = 1e-9  # of products of shares and numbers of clients
TRIED = "settings-tried"
"""Key of the number of settings tried to choose those of a system."""


class AdversaryConfig(Config):
    """Adversary with malicious clients among the training clients, for simulations only. They are
    added to the honest clients; sampler, clip and noise treat them alike, and the guarantee of
    `[privacy]` is for the honest clients, computed as if there were no others."""

    attack: Annotated[Section, registry.POISONING]
    """Attack: a name, or a table with settings."""
    share: float | None = Field(default=None, ge=0, le=1)
    """Number of malicious clients as a share of the honest training clients, at least one; 0: no
    malicious clients, only the targets are measured. Default: 0.01, unless `clients` is set."""
    clients: int | None = Field(default=None, ge=0)
    """Number of malicious clients, instead of `share`; at most the number of honest clients."""
    targets: int = Field(default=1, ge=1)
    """Number of promoted items; at most the number of items."""
    target_choice: Literal["least-popular", "random"] = "least-popular"
    """Choice of promoted items: those with the fewest training rows, or random by the seed."""
    target_items: tuple[str, ...] = ()
    """Ids of the promoted items in the dataset, without duplicates; default: items are chosen."""
    public_share: float = Field(default=0.01, ge=0, le=1)
    """Share of each honest client's training rows that the adversary knows, rounded up; it derives
    the items' popularity from these rows. 0: none, 1: all."""

    @field_validator("attack", mode="before")
    @classmethod
    def _attack_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_counted_once(self) -> Self:
        if self.share is not None and self.clients is not None:
            raise ValueError("share, or clients, which is a number, but not both")
        return self

    def number_among(self, honest: int) -> int:
        """Number of malicious clients for a number of honest ones."""
        if self.clients is not None:
            return self.clients
        share = 0.01 if self.share is None else self.share
        return max(1, int(share * honest + 1e-9)) if share else 0


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
    metrics: tuple[Section, ...] | None = None
    """Metrics in addition to those of the task: names, or tables with settings; default: none."""
    shown: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Metrics of the printed table, such as `recall@20`; files contain all metrics. Default, also
    if the experiment has none of these: hit rates and NDCG@10, or errors of ratings."""
    inactive_below: int = Field(default=20, ge=0)
    """Users with fewer known interactions than this form the group `inactive`."""
    baselines: tuple[str | Section, ...] = ("popularity", "ease")
    """Centralised recommenders to evaluate under the same protocol: names, or tables with settings
    such as `{ name = "dp-popularity", epsilon = 5.0 }`; a `label` names one in result tables, so
    that a baseline can occur with several settings. `settings-tried` is the number of settings
    tried to choose them."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics_by_name(cls, value: Any) -> Any:
        return sections_by_name(value)

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
        labels = [section.options.get("label", section.name) for section in sections]
        for label, section in zip(labels, sections, strict=True):
            if not isinstance(label, str) or not label.strip(" .") or "/" in label:
                raise ExperimentError(
                    "invalid label in evaluation.baselines",
                    expected="a text without '/', which is also used as a folder name",
                    got=repr(label),
                    fix='{ name = "dp-gram", label = "dp-gram-5", epsilon = 5.0 }',
                )
            tried = section.options.get(TRIED)
            if tried is not None and (type(tried) is not int or tried < 1):
                raise ExperimentError(
                    f"wrong value for 'baselines.{label}.{TRIED}'",
                    expected="the number of settings that were tried on validation users, >= 1",
                    got=repr(tried),
                    fix="correct or remove the key",
                )
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
    settings = {key: value for key, value in section.options.items() if key not in ("label", TRIED)}
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
    staleness_exponent: float = Field(default=0.5, ge=0)
    """Exponent a of the weight (1 + s)^-a of a reply to parameters of s rounds ago (paper: 0.5); 0:
    all replies have equal weight."""
