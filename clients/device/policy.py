# SPDX-License-Identifier: Apache-2.0
"""The owner's policy of a node: the experiments and orders that it accepts, and the privacy cost
that its limit counts.

Everything is decided before anything of an experiment is imported, opened or trained. The server
writes the experiment. The node's owner decides by a few settings which experiments the node takes
part in. Every order must then agree with the experiment: an existing round, the step of its phase,
and at least its protection. No setting may name a file of the node. The text of a refusal contains
only what the server sent.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

from pydantic import Field

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError, RefusalError
from fedrec.experiment.loading import from_run_config
from fedrec.experiment.phases import (
    Phase,
    contributions_of,
    phase_at,
    phases_of,
    step_table,
)
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section, component_settings, sections_within
from fedrec.privacy.accounting.events import GAUSSIAN, LAPLACE
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.personal import PersonalNoise
from fedrec.privacy.plan import least_client_noise
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import EvaluateOrder, TrainOrder

# Cost of the noise that a user's device adds itself, for the owner's limit over all runs.
#
# Neighbours differ in all rows of one user (the sensitivity is 2S), and who takes part is known, so
# that no sampling amplifies. Releases of Gaussian noise compose exactly by the sum of mu^2 (Dong,
# Roth and Su 2022). A release with pure epsilon e is one of mu = -2 Phi^-1(1 / (1 + exp(e))): its
# trade-off function lies above the chord of the Gaussian one.

_DELTA = 1e-5


def client_noise(phase: Phase) -> PersonalNoise | None:
    """The settings of noise of each client's own in the step of a phase; None: it has none."""
    settings = component_settings(registry.STEP, Section.model_validate(phase.step))
    return settings if isinstance(settings, PersonalNoise) else None


def rho_of(protection: Protection | None, noise: PersonalNoise | None) -> float | None:
    """mu^2 / 2 of one upload, which is zero-concentrated DP (Bun and Steinke 2016) for Gaussian
    noise; of the user with the largest budget; None: the noise has no known cost.

    Args:
        protection: of the order, with a noise scale above 0 where clients add noise.
        noise: that of the step, which counts instead.
    """
    if noise is not None:
        cost = noise.of_largest_budget().cost(0, "replace-one", 1)
        return cost / 2 if math.isfinite(cost) else None
    if protection is None or protection.noise_scale <= 0:
        return None
    moved = Clip(protection.clip_norm).sensitivity("replace-one")
    multiplier = protection.noise_scale / moved
    name = mechanism_of(protection.mechanism).name
    if name == GAUSSIAN:
        return multiplier**-2 / 2
    if name != LAPLACE:
        return None
    from scipy.special import ndtri  # importing it is slow, and most noise is Gaussian

    return float(-2 * ndtri(1 / (1 + math.exp(min(1 / multiplier, 700.0))))) ** 2 / 2


def largest_rho(epsilon: float) -> float:
    """mu^2 / 2 of all uploads together that cost epsilon at delta 1e-5."""
    from fedrec.privacy.accounting.rdp import gdp_parameter  # likewise

    return gdp_parameter(epsilon, _DELTA) ** 2 / 2


RUN_KEY = re.compile("[0-9a-f]{16}")
"""Key of a run on a node; it is part of file names."""
_OURS = ("fedrec", "clients")
_EPSILON_WITH_LEAST_NOISE = 20.0
MOST = {"epochs": 1000, "negatives": 1000}
"""Largest number of epochs of a client in a round, and of negatives per positive."""
_FLOWERS = "flwr.serverapp.strategy:"


class Policy(Config):
    """Settings of a node's owner, in `node.toml` and by `fedrec client --set`."""

    most_rounds: int | None = Field(default=None, ge=0)
    """Rounds that a user may take part in, over all runs; default: with the user's own noise as
    many as the experiment has, without it any number."""
    most_evaluations: int = Field(default=10, ge=0)
    """Evaluations of a user, over all runs; each reveals how well parameters chosen by the server
    fit the user."""
    plugins: str = ""
    """Packages other than fedrec whose components may run here, separated by commas."""
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
    opted_in: bool = False
    """Whether its users take part in phases without noise that train only on volunteers."""

    report_errors: bool = False
    """Whether the texts of this node's errors are sent to the operator; they may quote its files
    and its users' data. They are in the node's own log in any case."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The policy in a node's settings, which contain other keys, too.

        Raises:
            ExperimentError: a value is wrong.
        """
        return cls.parse({key: settings[key] for key in set(cls.keys()) & set(settings)}, at="node")

    @property
    def reply_seconds(self) -> float:
        """`reply_interval`, or its default."""
        default = 1.0 if self.least_noise or self.least_nodes else 0.0
        return default if self.reply_interval is None else self.reply_interval

    @property
    def largest_rho(self) -> float | None:
        """Largest cost of a user's own noise over all runs, see `rho_of`; None: any."""
        default = _EPSILON_WITH_LEAST_NOISE if self.least_noise else None
        epsilon = self.most_epsilon or default
        return None if epsilon is None else largest_rho(epsilon)

    def accepted(self, experiment: Experiment) -> tuple[Phase, ...]:
        """The phases of an experiment that the node takes part in; its components may be resolved
        from then on.

        Raises:
            RefusalError: the node does not take part in it.
        """
        if experiment.adversary is not None:
            attack = f"attack {experiment.adversary.attack.name!r}"
            raise _simulated("malicious clients exist in simulations alone", "adversary", attack)
        if experiment.devices is not None:
            raise _simulated("real nodes have their own time", "devices", "a table [devices]")
        self._examine("model", registry.MODEL, experiment.model)
        self._examine("split", registry.SPLIT, experiment.split)
        self._examine("step", registry.STEP, experiment.step)
        if experiment.compression is not None:
            self._examine("compression", registry.COMPRESSION, experiment.compression)
        if experiment.privacy is not None:
            chosen = experiment.privacy.mechanism
            table = {"name": chosen} if isinstance(chosen, str) else chosen
            key = registry.MECHANISM.key
            self._examine(key, registry.MECHANISM, Section.model_validate(table))
        self._examine("evaluation.fine-tune", registry.STEP, experiment.fine_tune_step())
        for metric in experiment.evaluation.metrics or ():
            self._examine("evaluation.metrics", registry.METRIC, metric)
        _check_work("engine.threads", experiment.engine.threads or 1, os.cpu_count() or 1)
        # otherwise it runs only on the server
        asked = self._runs(registry.STRATEGY, experiment.strategy.name)
        if asked:
            self._examine("strategy", registry.STRATEGY, experiment.strategy)
        phases = phases_of(experiment, nested=asked)
        if experiment.perturb is not None:
            raise RefusalError(
                "perturbation of profiles is not available on real clients yet",
                expected="an experiment without [perturb]",
                fix="run it as a simulation",
            )
        if self.least_nodes and not experiment.secure_aggregation:
            raise RefusalError(
                "this node does not send its own sum",
                expected=(
                    f"secure-aggregation = true, with sums of at least {self.least_nodes} nodes"
                ),
                got="an experiment without secure aggregation",
                fix="ask the operator to enable it, or start the client without least-nodes",
            )
        if any(phase.volunteers for phase in phases) and not self.opted_in:
            raise RefusalError(
                "the users of this node have not opted in",
                expected=(
                    "an experiment without a phase for volunteers, such as stage-one.clients ="
                    " 'opted-in'"
                ),
                fix="to take part, start the client with --set opted-in=true",
            )
        for phase in phases:
            self._check_noise(experiment, phase)
        return phases

    def check_train(
        self,
        experiment: Experiment,
        phases: Sequence[Phase],
        order: TrainOrder,
        names: Iterable[str],
    ) -> None:
        """Refuse a training order that does not belong to the experiment.

        Args:
            experiment: an accepted experiment.
            phases: its phases.
            order: the order.
            names: of the parameters that came with it.

        Raises:
            RefusalError: its round, step or protection is another.
        """
        _check_round(order.round, 1, experiment.rounds)
        phase = phase_at(phases, order.round)
        if order.step is not None and not phase.has_step(order.step):
            raise _no_step(order.step, f"that of phase {phase.name!r}")
        _check_overrides(experiment, order.overrides or {})
        check_protection(experiment, phases, phase, order, names)
        ordered = order.protection
        if (
            self.least_noise
            and ordered is not None
            and ordered.noise_scale < self.least_noise * ordered.clip_norm
        ):
            raise self._too_little(f"{ordered.noise_scale / ordered.clip_norm:.4g}")

    def check_evaluate(self, experiment: Experiment, order: EvaluateOrder) -> None:
        """Refuse an evaluation that does not belong to an accepted experiment.

        Raises:
            RefusalError: its round or its step is another.
        """
        _check_round(order.round, 0, experiment.rounds)
        if order.held_out is not None:
            raise RefusalError(
                "the order evaluates other rows than the experiment does",
                expected="no held-out rows of its own",
                got=repr(order.held_out),
                fix="set evaluation.held-out in the experiment",
            )
        if order.sums:
            raise RefusalError(
                "the order asks for sums over the lists of this node's users",
                expected="metrics of each user alone",
                got="sums that would tell the server which items are in the lists, and which of"
                " its items a user likes",
                fix="measure coverage, concentration and popularity of lists in a simulation",
            )
        step = step_table(experiment.fine_tune_step())
        allowed = (Phase("evaluation", step), Phase("evaluation", {**step, "epochs": 0}))
        if order.step is not None and not any(phase.has_step(order.step) for phase in allowed):
            raise _no_step(order.step, "that of fine-tuning, or none")

    def _examine(self, at: str, kind: registry.Kind, section: Section) -> None:
        """Refuse a component (or one within it) from a package that the owner did not allow, such
        as `simulations` with those of attacks, or with a file in its settings; none is imported
        before its name is checked."""
        if not self._runs(kind, section.name):
            raise RefusalError(
                f"this node does not run {section.name!r} ({at})",
                expected="a component of fedrec, or of a package that its owner allows",
                got=repr(section.name),
                fix=(
                    "the owner of the node starts the client with --set plugins=PACKAGE, and again"
                    " after a package was installed (fedrec deploy down, then up)"
                ),
            )
        component = registry.resolve(kind, section.name)
        config_class = getattr(component, "Config", None)
        if config_class is None:
            return
        settings = config_class.parse(section.options, at=at)
        for file in settings.files():
            raise RefusalError(
                f"a setting of {at} names a file",
                expected=("settings without files: a server must not read a node's files"),
                got=repr(file),
                fix="run it as a simulation, or choose another source",
            )
        for field, most in MOST.items():
            _check_work(f"{at}.{field}", getattr(settings, field, 0) or 0, most)
        for _, inner, section_within in sections_within(settings):
            self._examine(f"{at}: {inner.name}", inner, section_within)

    def _runs(self, kind: registry.Kind, name: str) -> bool:
        """Return True if a component may be imported."""
        if ":" in name:
            return _package(name) in (*self._packages, *_OURS) or name.startswith(_FLOWERS)
        if name in registry.builtin_names(kind):
            return True
        path = registry.place_of(kind, name)
        return path is not None and _package(path) in self._packages

    @property
    def _packages(self) -> list[str]:
        return [part.strip() for part in self.plugins.split(",") if part.strip()]

    def _check_noise(self, experiment: Experiment, phase: Phase) -> None:
        noise = client_noise(phase)
        if noise is not None and noise.noise != "secure":
            raise RefusalError(
                "noise from the experiment's seed gives no protection from the server",
                expected="step.noise = 'secure'",
                got=f"step.noise = {noise.noise!r}",
                fix="--set step.noise=secure",
            )
        if not self.least_noise:
            return
        privacy = experiment.privacy
        if privacy is not None and privacy.covers(phase.name) and privacy.placement != "central":
            return  # the noise scale is checked in each order
        added = 0.0
        if noise is not None and noise.mode == "sound":
            added = noise.of_largest_budget().noise_multiplier(0)
        if added < self.least_noise:
            raise self._too_little("less, or noise added by the server")

    def _too_little(self, got: str) -> RefusalError:
        return RefusalError(
            "the owner of this node requires more noise from its users' devices",
            expected=f"noise scale / clip norm of at least {self.least_noise:g} (least-noise)",
            got=got,
            fix="set privacy.placement = 'local' and more noise, or run without this node",
        )


def experiment_of(run_config: Mapping[str, Any]) -> Experiment:
    """The experiment of a run on a real node, which is sent complete.

    Raises:
        RefusalError: there is none, or it is invalid.
    """
    if not run_config.get("resolved"):
        raise RefusalError(
            "there is no experiment",
            expected="a resolved experiment in the run configuration",
            got="none",
            fix="start the run with fedrec deploy run",
        )
    try:
        return from_run_config({"resolved": run_config["resolved"]})
    except (ExperimentError, ValueError, TypeError, RecursionError) as error:
        raise RefusalError(
            "the experiment is invalid",
            expected="one that this node's version of fedrec can read",
            got=str(error)[:500],
            fix="run the same version of fedrec on server and node",
        ) from None


def run_key(run_config: Mapping[str, Any]) -> str:
    """The key of a run.

    Raises:
        RefusalError: it is missing or malformed.
    """
    key = str(run_config.get("run", ""))
    if RUN_KEY.fullmatch(key) is None:
        raise RefusalError(
            "the run has no run key",
            expected="16 hexadecimal digits",
            got=repr(key[:100]),
            fix="start the run with fedrec deploy run",
        )
    return key


def _check_work(setting: str, value: object, most: int) -> None:
    """Refuse more work than a node does."""
    if isinstance(value, int) and value > most:
        raise RefusalError(
            f"{setting} is more than this node does",
            expected=f"at most {most}",
            got=str(value),
            fix="ask for less",
        )


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


def _check_round(number: int, first: int, last: int) -> None:
    if not first <= number <= last:
        raise RefusalError(
            "the order is for a round that the experiment does not have",
            expected=f"a round from {first} to {last}",
            got=str(number),
            fix="start a separate run with more rounds",
        )


def _check_overrides(experiment: Experiment, overrides: Mapping[str, float]) -> None:
    """Refuse settings in an order, except those that Flower's strategies send."""
    for key, value in overrides.items():
        if not experiment.strategy.name.startswith(_FLOWERS) or not 0 <= value < math.inf:
            raise RefusalError(
                f"the order has a setting {key!r}",
                expected="the experiment's own",
                got=f"{value:g}",
                fix="set it in the experiment",
            )


def _no_step(step: Mapping[str, Any], expected: str) -> RefusalError:
    return RefusalError(
        "the order's step is not a step of the experiment",
        expected=expected,
        got=json.dumps(step)[:300],
        fix="start a separate run for another step",
    )


def _simulated(problem: str, section: str, got: str) -> RefusalError:
    """The refusal of an experiment with a section that is for simulations alone."""
    return RefusalError(
        problem,
        expected=f"an experiment without [{section}]",
        got=got,
        fix="run it as a simulation: fedrec run",
    )


# An order protects clients as its experiment specifies; less is refused.

_ROUNDING = 1e-9


def check_protection(
    experiment: Experiment,
    phases: Sequence[Phase],
    phase: Phase,
    order: TrainOrder,
    names: Iterable[str],
) -> None:
    """Refuse an order whose protection is not that of its phase.

    Args:
        experiment: the experiment.
        phases: its phases.
        phase: that of the order.
        order: the order.
        names: of the parameters that came with it.

    Raises:
        RefusalError: it has less noise, another clip, more parameters, or no protection where the
            experiment has some.
    """
    ordered = order.protection
    privacy = experiment.privacy
    if privacy is None or not privacy.covers(phase.name):
        if ordered is not None:
            raise _other_protection("a protection that the experiment does not have")
        return
    # the reply to an order for all clients is a plain mean
    if ordered is None or order.clients is None:
        raise _other_protection("none")
    in_phase = privacy.in_phase(phase.name)
    clip = in_phase.clip(contributions_of(phase.step))
    _check_kind_of_protection(ordered, in_phase, clip)
    least = _least_noise(experiment, phases, phase, in_phase, clip)
    if not least * (1 - _ROUNDING) <= ordered.noise_scale < math.inf:
        raise _other_protection(f"noise scale {ordered.noise_scale}")
    more = sorted(
        name
        for name in ordered.names
        if not any(fnmatchcase(name, pattern) for pattern in in_phase.parameters)
    )
    if more or not set(ordered.names) <= set(names):
        raise _other_protection(f"parameters {more[:3]}")


def _check_kind_of_protection(ordered: Protection, privacy: PrivacyConfig, clip: Clip) -> None:
    """Refuse a protection that differs in more than the noise scale, the parameters and an adaptive
    clip norm, which depends on a count that only the server knows."""
    adaptive = privacy.adaptive_clip is not None
    if not 0 < ordered.clip_norm < math.inf or (ordered.clip_norm != clip.norm and not adaptive):
        raise _other_protection(f"clip norm {ordered.clip_norm}")
    agreed = Protection.of(
        privacy, clip.at(ordered.clip_norm), ordered.names, noise_scale=ordered.noise_scale
    )
    for field in dataclasses.fields(Protection):
        value = getattr(ordered, field.name)
        # not a plain comparison of the two: a noise scale of NaN is not equal to itself
        if field.name != "noise_scale" and value != getattr(agreed, field.name):
            raise _other_protection(f"{field.name} = {value!r}")


def _least_noise(
    experiment: Experiment,
    phases: Sequence[Phase],
    phase: Phase,
    privacy: PrivacyConfig,
    clip: Clip,
) -> float:
    """The smallest scale of a client's own noise that the experiment allows in a phase."""
    rounds = [phase_at(phases, number).name for number in range(1, experiment.rounds + 1)]
    sampler = experiment.sampler if phase.sampler is None else phase.sampler
    return least_client_noise(
        privacy,
        clip,
        privacy.noise_mix(rounds),
        factor=privacy.noise_factor(phase.name),
        cohort=sampler.options.get("cohort"),
    )


def _other_protection(got: str) -> RefusalError:
    return RefusalError(
        "the order's protection is not that of the experiment",
        expected="clip norm, noise and parameters as in [privacy]",
        got=got,
        fix="start a separate run for another [privacy]",
    )
