# SPDX-License-Identifier: Apache-2.0
"""Whether a training order protects clients as its experiment says: a server that asks for less
gets nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fedrec.errors import RefusalError
from fedrec.experiment.phases import Phase, contributions_of
from fedrec.experiment.schema import Experiment
from fedrec.privacy.adjacency import sensitivity
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.noise import default_delta, norm_order
from fedrec.privacy.personal.budgets import gdp_parameter
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder

_ROUNDING = 1e-9


def refuse_less_protection(
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
        RefusalError: it has less noise, another clip, more parameters, or none at all where the
            experiment has some.
    """
    told, privacy = order.protection, experiment.privacy
    if privacy is None or not privacy.covers(phase.name):
        if told is not None:
            raise _other("a protection that the experiment has not")
        return
    if told is None or order.clients is None:  # an order for everybody is answered with a bare mean
        raise _other("none")
    own = privacy.in_phase(phase.name)
    _refuse_other_kind(told, own)
    if (
        not _least_noise(experiment, own, phase, phases) * (1 - _ROUNDING)
        <= told.noise_scale
        < math.inf
    ):
        raise _other(f"noise scale {told.noise_scale}")
    more = sorted(
        name
        for name in told.names
        if not any(fnmatchcase(name, pattern) for pattern in own.parameters)
    )
    if more or not set(told.names) <= set(names):
        raise _other(f"parameters {more[:3]}")


def _refuse_other_kind(told: Protection, privacy: PrivacyConfig) -> None:
    exact = {
        "order": (told.order, 1 if privacy.mechanism == "laplace" else 2),
        "mechanism": (told.mechanism, privacy.mechanism),
        "counted": (told.counted, privacy.adaptive_clip is not None),
        "silent": (told.silent, privacy.mode == "secure"),
    }
    for name, (given, expected) in exact.items():
        if given != expected:
            raise _other(f"{name} = {given!r}")
    moves = privacy.adaptive_clip is not None  # under noise of the server's
    if not 0 < told.clip_norm < math.inf or (told.clip_norm != privacy.clip_norm and not moves):
        raise _other(f"clip norm {told.clip_norm}")


def _least_noise(
    experiment: Experiment, privacy: PrivacyConfig, phase: Phase, phases: Sequence[Phase]
) -> float:
    """The least scale of a client's own noise that the experiment can mean; 0 where the server adds
    it.

    The exact scale may depend on the number of clients, which only the server knows. Where epsilon
    is given for local Gaussian noise, this is the scale at which that many releases cost just so
    much: no accountant allows less. For other noise that depends on that number, it is any noise at
    all; an owner who wants more says so.
    """
    anything = privacy.clip_norm * _ROUNDING
    whole = sensitivity(
        privacy.clip_norm,
        privacy.adjacency,
        contributions_of(phase.step["name"]),
        order=norm_order(privacy),
    )
    if privacy.placement == "central":
        return 0.0
    if privacy.noise_multiplier is not None:
        relative = privacy.noise_relative_to == "clip-norm"
        unit = privacy.clip_norm if relative else whole
        scale = privacy.noise_multiplier * privacy.noise_factor(phase.name) * unit
        if privacy.placement == "local":
            return scale
        cohort = experiment.sampler.options.get("cohort")
        return (
            min(scale, anything)
            if cohort is None
            else scale / math.sqrt(max(1.0, cohort - privacy.max_dropouts))
        )
    if (
        privacy.placement == "local"
        and privacy.epsilon is not None
        and privacy.mechanism == "gaussian"
    ):
        releases = experiment.rounds if len(phases) == 1 else 1
        delta = default_delta(1) if privacy.delta is None else privacy.delta
        return math.sqrt(releases) * whole / gdp_parameter(privacy.epsilon, delta)
    return anything


def _other(got: str) -> RefusalError:
    return RefusalError(
        "the order's protection is not that of the experiment",
        expected="clip norm, noise and parameters as in [privacy]",
        got=got,
        fix="start a run of its own for another [privacy]",
    )
