# SPDX-License-Identifier: Apache-2.0
"""A node owner's policy: the experiments and orders that are accepted, and the privacy cost of
uploads.

Everything is decided before anything of an experiment is imported, opened or trained. The server
writes the experiment. The node's owner decides by a few settings which experiments the node takes
part in. Every order must then be that of the experiment: an existing round, the step of its phase,
and at least its protection. No setting may name a file of the node. The text of a refusal contains
only what the server sent.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from fedrec.components import registry
from fedrec.components.sections import Section, component_settings, sections_within
from fedrec.config import Config, fits
from fedrec.errors import ExperimentError, RefusalError
from fedrec.experiment.phases import Phase, contributions_of, phase_at, phases_of, step_table
from fedrec.experiment.schema import Experiment, from_run_config
from fedrec.privacy.accounting.events import GAUSSIAN, LAPLACE
from fedrec.privacy.clipping import Clip, Protection
from fedrec.privacy.mechanisms import mechanism_of
from fedrec.privacy.personal import PersonalNoise
from fedrec.privacy.plan import least_client_noise
from fedrec.protocol.messages import EvaluateOrder, TrainOrder

# Cost of the noise that a user's device adds itself, for the owner's limit over all runs.
#
# Neighbours differ in all rows of one user (the sensitivity is 2S), and who takes part is known, so
# that no sampling amplifies. Releases of Gaussian noise compose exactly by the sum of mu^2 (Dong,
# Roth and Su 2022). A release with pure epsilon e is one of mu = -2 Phi^-1(1 / (1 + exp(e))): its
# trade-off function lies above the chord of the Gaussian one.

_DELTA = 1e-5


def client_noise(phase: Phase) -> PersonalNoise | None:
    """Settings of the noise that each client adds in a phase's step; None: no noise."""
    settings = component_settings(registry.STEP, Section.model_validate(phase.step))
    return settings if isinstance(settings, PersonalNoise) else None


def rho_of(protection: Protection | None, noise: PersonalNoise | None) -> float | None:
    """Cost rho = mu^2 / 2 of one upload, which is zero-concentrated DP (Bun and Steinke 2016) for
    Gaussian noise, of the user with the largest budget; None: unknown cost.

    Args:
        protection: of the order, with a noise scale above 0 where clients add noise.
        noise: noise settings of the step, which take precedence.
    """
    if noise is not None:
        cost = noise.of_largest_budget().cost(0, "replace-one", 1)
        return cost / 2 if math.isfinite(cost) else None
    if protection is None or protection.noise_scale <= 0:
        return None
    multiplier = protection.noise_scale / Clip(protection.clip_norm).sensitivity("replace-one")
    name = mechanism_of(protection.mechanism).name
    if name == GAUSSIAN:
        return multiplier**-2 / 2
    if name != LAPLACE:
        return None
    from scipy.special import ndtri  # slow import, and most noise is Gaussian

    return float(-2 * ndtri(1 / (1 + math.exp(min(1 / multiplier, 700.0))))) ** 2 / 2


RUN_KEY = re.compile("[0-9a-f]{16}")
"""Key of a run on a node; it is part of file names."""
_OURS = ("fedrec", "clients")
_EPSILON_WITH_LEAST_NOISE = 20.0
MOST = {"epochs": 1000, "negatives": 1000}
"""Largest number of epochs of a client in a round, and of negatives per positive."""
SIMULATED = ("adversary", "compression", "devices", "perturb")
"""Sections of an experiment that only simulations have."""
_FLOWERS = "flwr.serverapp.strategy:"
_ROUNDING = 1e-9


FILES = ("private-dir", "data", "catalogue", "join")
"""Keys of a node's files in its settings: the folder of its private state, the users' CSV file, the
operator's catalogue, and the folder from the operator with the node's identity."""


class Policy(Config):
    """Settings of a node's owner, in `node.toml` and by `fedrec client --set`."""

    most_rounds: int | None = Field(default=None, ge=0)
    """Rounds that a user may take part in, over all runs; default: with the user's own noise as
    many as the experiment has, without it any number."""
    most_evaluations: int = Field(default=10, ge=0)
    """Evaluations of a user, over all runs; each reveals how well parameters chosen by the server
    fit the user."""
    plugins: str = Field(default="", pattern=r"^[\w., -]*$")
    """Packages other than fedrec whose components may run here, separated by commas."""
    numbers: bool = False
    """Whether the names in the data file are the users' numbers, which then are not secret."""
    least_nodes: int = Field(default=0, ge=0)
    """Smallest number of nodes in a sum to which this node contributes, by secure aggregation; 0:
    it may send its own sum."""
    least_noise: float = Field(default=0.0, ge=0)
    """Smallest noise that a user's device must add: noise scale / clip norm; 0: none."""
    most_epsilon: float | None = Field(default=None, gt=0)
    """Largest epsilon, at delta 1e-5, of the noise that a user's device adds itself, over all runs
    and for all of the user's rows; noise whose cost is unknown is above any limit. Default: with
    `least-noise` 20, without it any, since updates without noise have no epsilon."""
    reply_interval: float | None = Field(default=None, ge=0, le=3600)
    """Seconds: a reply leaves only at a multiple of this after its message arrived, so that its
    time does not tell how many rows the users have; 0: at once. Default: 1 with `least-noise` or
    `least-nodes`, otherwise 0."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The policy in a node's settings, which contain `FILES`, too.

        Raises:
            ExperimentError: a setting is unknown, or its value is wrong.
        """
        policy = {key: value for key, value in settings.items() if key not in FILES}
        return cls.parse(policy, at="node")

    @property
    def reply_seconds(self) -> float:
        """Value of `reply_interval`, or its default."""
        default = 1.0 if self.least_noise or self.least_nodes else 0.0
        return default if self.reply_interval is None else self.reply_interval

    @property
    def largest_rho(self) -> float | None:
        """Limit on a user's total cost mu^2 / 2 over all runs, see `rho_of`; None: no limit."""
        from fedrec.privacy.accounting.rdp import gdp_parameter  # as slow

        default = _EPSILON_WITH_LEAST_NOISE if self.least_noise else None
        epsilon = self.most_epsilon or default
        return None if epsilon is None else gdp_parameter(epsilon, _DELTA) ** 2 / 2

    def accepted(self, experiment: Experiment) -> tuple[Phase, ...]:
        """Check an experiment and return its phases; its components may be resolved afterwards.

        Raises:
            RefusalError: the policy does not allow the experiment.
        """
        for section in SIMULATED:
            if getattr(experiment, section) is not None:
                raise _refused(f"[{section}] is only for simulations", "run it with fedrec run")
        if (experiment.engine.threads or 1) > (os.cpu_count() or 1):
            raise _refused("engine.threads is above this node's limit")
        for at, kind, section in self._run_by_nodes(experiment):
            self._examine(at, kind, section)
        if self.least_nodes and not experiment.secure_aggregation:
            raise _refused(
                "this node does not send its own sum: its owner set least-nodes ="
                f" {self.least_nodes}",
                "set secure-aggregation = true",
            )
        # otherwise the strategy runs only on the server
        nested = self._runs(registry.STRATEGY, experiment.strategy.name)
        phases = phases_of(experiment, nested=nested)
        for phase in phases:
            self._check_noise(experiment, phase)
        return phases

    def check_order(
        self,
        experiment: Experiment,
        phases: Sequence[Phase],
        order: TrainOrder | EvaluateOrder,
        names: Iterable[str],
    ) -> None:
        """Check that an order matches the experiment.

        Args:
            experiment: an accepted experiment.
            phases: its phases.
            order: the order.
            names: names of the parameters in the message.

        Raises:
            RefusalError: its round, step, settings, protection or rows differ, or it requests sums
                over the lists of this node's users, which would reveal their items.
        """
        trains = isinstance(order, TrainOrder)
        difference = (
            _train_difference(experiment, phases, order, names)
            if trains
            else _evaluation_difference(experiment, order)
        )
        if difference is not None:
            raise RefusalError(
                "the order does not match the experiment",
                expected="the experiment's rounds, steps, settings and protection",
                got=difference,
                fix="start a separate run for another experiment",
            )
        ordered = order.protection if trains else None
        if ordered is not None and ordered.noise_scale < self.least_noise * ordered.clip_norm:
            raise self._too_little()

    def _run_by_nodes(self, experiment: Experiment) -> Iterator[tuple[str, registry.Kind, Section]]:
        """Components of an experiment that a node runs: their key, kind and settings."""
        yield "model", registry.MODEL, experiment.model
        yield "split", registry.SPLIT, experiment.split
        yield "step", registry.STEP, experiment.step
        yield "evaluation.fine-tune", registry.STEP, experiment.fine_tune_step()
        if experiment.privacy is not None:
            chosen = experiment.privacy.mechanism
            table = {"name": chosen} if isinstance(chosen, str) else chosen
            yield "privacy.mechanism", registry.MECHANISM, Section.model_validate(table)
        for metric in experiment.evaluation.metrics or ():
            yield "evaluation.metrics", registry.METRIC, metric
        if self._runs(registry.STRATEGY, experiment.strategy.name):
            yield "strategy", registry.STRATEGY, experiment.strategy

    def _examine(self, at: str, kind: registry.Kind, section: Section) -> None:
        """Check that a component and those within it come from allowed packages (not from
        `simulations` with its attacks, for example) and name no files; none is imported before."""
        if not self._runs(kind, section.name):
            raise _refused(
                f"this node does not run {section.name!r} ({at})",
                "ask the node's owner to restart the client with --set plugins=PACKAGE after"
                " installing the package (fedrec deploy down, then up)",
            )
        component = registry.resolve(kind, section.name)
        config_class = getattr(component, "Config", None)
        if config_class is None:
            return
        settings = config_class.parse(section.options, at=at)
        for file in settings.files():
            raise _refused(f"a setting of {at} names a file: {file!r}")
        for field, most in MOST.items():
            value = getattr(settings, field, 0)
            if isinstance(value, int) and value > most:
                raise _refused(f"{at}.{field} is above this node's limit of {most}")
        for _, inner, section_within in sections_within(settings):
            self._examine(f"{at}: {inner.name}", inner, section_within)

    def _runs(self, kind: registry.Kind, name: str) -> bool:
        """Return True if a component may be imported."""
        packages = [part.strip() for part in self.plugins.split(",") if part.strip()]
        if ":" in name:
            return _package(name) in (*packages, *_OURS) or name.startswith(_FLOWERS)
        if name in registry.builtin_names(kind):
            return True
        path = registry.place_of(kind, name)
        return path is not None and _package(path) in packages

    def _check_noise(self, experiment: Experiment, phase: Phase) -> None:
        noise = client_noise(phase)
        if noise is not None and noise.noise != "secure":
            raise _refused(
                f"step.noise = {noise.noise!r} gives no protection from the server, which knows"
                " the experiment's seed",
                "--set step.noise=secure",
            )
        if not self.least_noise:
            return
        privacy = experiment.privacy
        if privacy is not None and privacy.placement != "central":
            return  # the noise scale is checked in each order
        added = 0.0
        if noise is not None and noise.mode == "sound":
            added = noise.of_largest_budget().noise_multiplier(0)
        if added < self.least_noise:
            raise self._too_little()

    def _too_little(self) -> RefusalError:
        return _refused(
            "the owner of this node requires noise scale / clip norm of at least"
            f" {self.least_noise:g} from its users' devices (least-noise)",
            "set privacy.placement = 'local' and more noise, or run without this node",
        )


def experiment_of(run_config: Mapping[str, Any]) -> Experiment:
    """Read the complete experiment of a run on a real node.

    Raises:
        RefusalError: the experiment is missing or invalid.
    """
    if not run_config.get("resolved"):
        raise _refused("the run has no experiment", "start the run with fedrec deploy run")
    try:
        return from_run_config({"resolved": run_config["resolved"]})
    except (ExperimentError, ValueError, TypeError, RecursionError) as error:
        raise _refused(
            f"the experiment is invalid: {str(error)[:500]}",
            "run the same version of fedrec on server and node",
        ) from None


def run_key(run_config: Mapping[str, Any]) -> str:
    """The key of a run.

    Raises:
        RefusalError: it is missing or malformed.
    """
    key = str(run_config.get("run", ""))
    if RUN_KEY.fullmatch(key) is None:
        raise _refused(
            f"the run key {key[:100]!r} is not 16 hexadecimal digits",
            "start the run with fedrec deploy run",
        )
    return key


def _refused(problem: str, fix: str = "change the experiment") -> RefusalError:
    return RefusalError(problem, fix=fix)


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


# Differences between an order and the experiment, for which the order is refused.


def _train_difference(
    experiment: Experiment, phases: Sequence[Phase], order: TrainOrder, names: Iterable[str]
) -> str | None:
    """Description of a difference between a training order and the experiment; None: there is none.
    For the arguments see `Policy.check_order`. More noise than the experiment's is not a
    difference."""
    if not 1 <= order.round <= experiment.rounds:
        return f"round: {order.round}"
    phase = phase_at(phases, order.round)
    if order.step is not None and not phase.has_step(order.step):
        return f"step: {json.dumps(order.step)[:300]} in phase {phase.name!r}"
    for key, value in (order.overrides or {}).items():
        if not experiment.strategy.name.startswith(_FLOWERS) or not 0 <= value < math.inf:
            return f"{key}: {value:g}"
    ordered = order.protection
    privacy = experiment.privacy
    if privacy is None:
        return None if ordered is None else "protection: not in the experiment"
    # the reply to an order for all clients is a plain mean
    if ordered is None or order.clients is None:
        return "protection: none"
    in_phase = privacy.in_phase(phase.name)
    clip = in_phase.clip(contributions_of(phase.step))
    sampler = experiment.sampler if phase.sampler is None else phase.sampler
    least = least_client_noise(
        in_phase,
        clip,
        in_phase.noise_mix([phase_at(phases, r).name for r in range(1, experiment.rounds + 1)]),
        factor=in_phase.noise_factor(phase.name),
        cohort=sampler.options.get("cohort"),
    )
    if not least * (1 - _ROUNDING) <= ordered.noise_scale < math.inf:
        return f"protection: noise scale {ordered.noise_scale}"
    agreed = in_phase.protection(clip, ordered.names, ordered.noise_scale)
    if ordered != agreed:
        return f"protection: {ordered.text()[:300]}"
    allowed = {name for name in names if fits(name, in_phase.parameters)}
    more = sorted(set(ordered.names) - allowed)
    return f"protection: of parameters {more[:3]}" if more else None


def _evaluation_difference(experiment: Experiment, order: EvaluateOrder) -> str | None:
    """Description of a difference between an evaluation order and the experiment; None: there is
    none."""
    if not 0 <= order.round <= experiment.rounds:
        return f"round: {order.round}"
    if order.held_out is not None:
        return f"held-out rows: {order.held_out!r}"
    if order.each:
        return "parameters: one set per client"
    if order.sums:
        return "sums: over the lists of users"
    step = step_table(experiment.fine_tune_step())
    allowed = (Phase("evaluation", step), Phase("evaluation", {**step, "epochs": 0}))
    if order.step is not None and not any(phase.has_step(order.step) for phase in allowed):
        return f"step: {json.dumps(order.step)[:300]} to fine-tune with"
    return None
