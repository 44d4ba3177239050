# SPDX-License-Identifier: Apache-2.0
"""The noise of a `[privacy]` table in units of the clip norm: given or calibrated, increased if a
noisy count takes a share of the budget, and adjusted to the configured order."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Sampling
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import Mix, PrivacyConfig
from fedrec.privacy.mechanisms.base import Mechanism

_SOME = 1e-9  # clip norms
_COUNTED = Clip(0.5)  # the count adds 1/2 or -1/2 per client: it has signs, whatever updates have


def default_delta(clients: int) -> float:
    """The smaller of N^-1.1 and 1e-5."""
    return min(float(clients) ** -1.1, 1e-5)


def count_noise_std(config: PrivacyConfig, denominator: float) -> float | None:
    """Standard deviation of the noise on the count of unclipped clients; None without adaptive
    clipping."""
    adaptive = config.adaptive_clip
    if adaptive is None:
        return None
    return denominator / 20 if adaptive.count_noise is None else adaptive.count_noise


def count_multiplier(config: PrivacyConfig, denominator: float) -> float | None:
    """Noise multiplier of the count of unclipped clients under the adjacency of the settings; None
    without adaptive clipping."""
    std = count_noise_std(config, denominator)
    return None if std is None else std / _COUNTED.sensitivity(config.adjacency)


def noise_per_clip_norm(
    config: PrivacyConfig,
    clip: Clip,
    sampling: Sampling,
    mix: Mix,
    delta: float,
    *,
    denominator: float,
    server_lr: float,
    factor: float = 1.0,
) -> float:
    """Noise scale of the sum (of one upload when local) / clip norm.

    Args:
        config: the settings.
        clip: of the clients' updates.
        sampling: how cohorts are drawn, for a target epsilon.
        mix: the parts of the run, for a target epsilon.
        delta: for a target epsilon.
        denominator: the fixed number that sums are divided by.
        server_lr: the strategy's learning rate (alpha2).
        factor: noise factor of the rounds.

    Raises:
        ExperimentError: no noise reaches the target, or the count alone costs more than the whole
            round may.
    """
    unit = clip.at(1.0)
    scale = factor * _joint(config, unit, sampling, mix, delta)
    count = count_multiplier(config, denominator)
    if count is not None:
        # Andrew et al.'s theorem is about noise in units of sensitivities, whose ratio is another
        # if the sum has no signs.
        sensitivity = unit.sensitivity(config.adjacency)
        scale = _beside_a_count(scale / sensitivity, count, config.adjacency) * sensitivity
    # PrivRec algorithm 2, line 9: only the mean is scaled by alpha2
    return scale / server_lr if config.paper_noise_order else scale


def least_client_noise(
    config: PrivacyConfig,
    clip: Clip,
    mix: Mix,
    *,
    factor: float = 1.0,
    cohort: float | None = None,
) -> float:
    """A lower bound on the scale of the noise that each client adds, without knowledge of the
    number of clients (N).

    With `noise-multiplier` it is the scale itself. With `epsilon` and local Gaussian noise it is
    the scale at which the releases of the mix cost exactly epsilon (Dong, Roth and Su 2022: the
    squares of 1 / noise multiplier add up), which no accountant can undercut. In the remaining
    case, noise calibrated to an unknown N, the bound is only that there is noise.

    Args:
        config: the settings.
        clip: of the clients' updates.
        mix: the parts of the run.
        factor: noise factor of the rounds.
        cohort: clients per round (M), which shares of distributed noise depend on; None: unknown.

    Returns:
        The bound; 0 where the server adds the noise.
    """
    from fedrec.privacy.accounting.gdp import gdp_parameter  # pulls in scipy

    if config.placement == "central":
        return 0.0
    some = clip.norm * _SOME
    if config.epsilon is None:
        scale = factor * _given(config, clip)
        if config.placement == "local":
            return scale
        return (
            min(scale, some)
            if cohort is None
            else scale / math.sqrt(max(1.0, cohort - config.max_dropouts))
        )
    if config.placement == "distributed" or config.noise().pair(1.0).mu is None:
        return some
    delta = default_delta(1) if config.delta is None else config.delta
    releases = sum(count / other**2 for other, count in mix)
    unit = clip.sensitivity(config.adjacency) / gdp_parameter(config.epsilon, delta)
    return factor * math.sqrt(releases) * unit


def refuse_unshareable(config: PrivacyConfig, sampler: str, denominator: float) -> None:
    """Refuse distributed noise where the clients' shares may not add up to enough.

    Raises:
        ExperimentError: the size of a cohort is not known, or all of it may fail.
    """
    if config.placement != "distributed":
        return
    if sampler == "poisson":
        raise ExperimentError(
            "distributed noise needs a cohort of known size",
            expected=(
                "sampler fixed-size: a small Poisson cohort would add too little noise, an empty"
                " one none"
            ),
            got="sampler poisson",
            fix="set sampler.name = 'fixed-size', or privacy.placement = 'central'",
        )
    if config.max_dropouts >= denominator:
        raise ExperimentError(
            "wrong value for 'privacy.max-dropouts'",
            expected=f"fewer than the {denominator:g} clients of a cohort",
            got=str(config.max_dropouts),
            fix=f"set privacy.max-dropouts = {int(denominator) - 1} or less",
        )


def _given(config: PrivacyConfig, clip: Clip) -> float:
    """Noise scale of a round of noise factor 1, from the given noise multiplier."""
    relative = config.noise_relative_to == "clip-norm"
    unit = clip.norm if relative else clip.sensitivity(config.adjacency)
    return (config.noise_multiplier or 0.0) * unit


def _joint(config: PrivacyConfig, unit: Clip, sampling: Sampling, mix: Mix, delta: float) -> float:
    """Noise scale / S that corresponds to the whole cost of a round of noise factor 1; `unit` is
    the clip at S = 1."""
    if config.epsilon is None:
        return _given(config, unit)
    target = config.epsilon, delta, config.backend
    multiplier = _calibrated(*target, mix, config.noise(), sampling, config.adjacency)
    return multiplier * unit.sensitivity(config.adjacency)


@lru_cache(maxsize=64)  # all releases of a mix need the same number, which may take a second
def _calibrated(
    epsilon: float,
    delta: float,
    backend: str,
    mix: Mix,
    mechanism: Mechanism,
    sampling: Sampling,
    adjacency: Adjacency,
) -> float:
    from fedrec.privacy.accounting.calibration import calibrate  # pulls in scipy

    def releases(multiplier: float) -> dict[Release, int]:
        total: Counter[Release] = Counter()
        for factor, rounds in mix:
            one = mechanism.release(sampling, adjacency, multiplier * factor)
            total.update(mechanism.releases(one, rounds, sampling))
        return dict(total)

    return calibrate(epsilon, delta, releases, backend=backend)


def _beside_a_count(joint: float, count: float, adjacency: Adjacency) -> float:
    """Andrew et al. 2021, theorem 1: noise multiplier of the sum, so that sum and count, of noise
    multiplier `count`, together cost `joint`."""
    left = joint**-2 - count**-2
    if left <= 0:
        unit = _COUNTED.sensitivity(adjacency)
        raise ExperimentError(
            "the count of adaptive clipping alone costs more than the whole round may",
            expected=f"noise on the count with standard deviation > {joint * unit:g}",
            got=f"{count * unit:g}",
            fix=(
                "raise privacy.adaptive-clip.count-noise or the cohort, or lower the noise"
                " multiplier"
            ),
        )
    return left**-0.5
