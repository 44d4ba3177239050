# SPDX-License-Identifier: Apache-2.0
"""Checks that a training order protects clients as its experiment specifies. The node rejects
orders with less protection."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fedrec.errors import RefusalError
from fedrec.experiment.phases import Phase, contributions_of, phase_at
from fedrec.experiment.schema import Experiment
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import least_client_noise
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
        RefusalError: it has less noise, another clip, more parameters, or no protection where the
            experiment has some.
    """
    ordered = order.protection
    privacy = experiment.privacy
    if privacy is None or not privacy.covers(phase.name):
        if ordered is not None:
            raise _other("a protection that the experiment does not have")
        return
    # the reply to an order for all clients is a plain mean
    if ordered is None or order.clients is None:
        raise _other("none")
    own = privacy.in_phase(phase.name)
    clip = own.clip(contributions_of(phase.step))
    _refuse_other_kind(ordered, own, clip)
    least = _least_noise(experiment, phases, phase, own, clip)
    if not least * (1 - _ROUNDING) <= ordered.noise_scale < math.inf:
        raise _other(f"noise scale {ordered.noise_scale}")
    more = sorted(
        name
        for name in ordered.names
        if not any(fnmatchcase(name, pattern) for pattern in own.parameters)
    )
    if more or not set(ordered.names) <= set(names):
        raise _other(f"parameters {more[:3]}")


def _refuse_other_kind(ordered: Protection, privacy: PrivacyConfig, clip: Clip) -> None:
    """Refuse a protection that differs in more than the noise scale, the parameters and an adaptive
    clip norm, which depends on a count that only the server knows."""
    adaptive = privacy.adaptive_clip is not None
    if not 0 < ordered.clip_norm < math.inf or (ordered.clip_norm != clip.norm and not adaptive):
        raise _other(f"clip norm {ordered.clip_norm}")
    agreed = Protection.of(
        privacy, clip.at(ordered.clip_norm), ordered.names, noise_scale=ordered.noise_scale
    )
    for field in dataclasses.fields(Protection):
        given = getattr(ordered, field.name)
        # not a plain comparison of the two: a noise scale of NaN is not equal to itself
        if field.name != "noise_scale" and given != getattr(agreed, field.name):
            raise _other(f"{field.name} = {given!r}")


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


def _other(got: str) -> RefusalError:
    return RefusalError(
        "the order's protection is not that of the experiment",
        expected="clip norm, noise and parameters as in [privacy]",
        got=got,
        fix="start a separate run for another [privacy]",
    )
