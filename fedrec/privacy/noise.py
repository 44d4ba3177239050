# SPDX-License-Identifier: Apache-2.0
"""How much noise a configuration means: as given or calibrated, less what a count takes, in the
order asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import Sampling
from fedrec.privacy.adjacency import Contributions, Multipliers, sensitivity
from fedrec.privacy.config import PrivacyConfig


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


def multipliers(
    config: PrivacyConfig,
    sampling: Sampling,
    mix: Mapping[float, int],
    delta: float,
    *,
    denominator: float,
    server_lr: float,
    factor: float = 1.0,
    contributions: Contributions = "signed",
) -> Multipliers:
    """Noise scale of the sum (of one upload when local) in both conventions.

    Args:
        config: the settings.
        sampling: how cohorts are drawn, for a target epsilon.
        mix: number of rounds by their noise factor, likewise.
        delta: likewise.
        denominator: the fixed number that sums are divided by.
        server_lr: the strategy's learning rate (alpha2).
        factor: noise factor of the rounds that are asked about.
        contributions: what clients contribute, see `fedrec.privacy.adjacency`.

    Raises:
        ExperimentError: no noise reaches the target, or a count alone costs more than the round
            may.
    """
    order = norm_order(config)
    per_clip_norm = factor * _joint(config, sampling, mix, delta, contributions, order)
    count_std = count_noise_std(config, denominator)
    if count_std is not None:
        per_clip_norm = _beside_a_count(per_clip_norm, count_std)
    if config.paper_noise_order:
        per_clip_norm /= server_lr  # PrivRec algorithm 2, line 9: only the mean is scaled by alpha2
    return Multipliers.of(per_clip_norm, 1.0, contributions, order=order)


def norm_order(config: PrivacyConfig) -> int:
    """2: updates are clipped in L2; 1: in L1, for Laplace noise."""
    return 1 if config.mechanism == "laplace" else 2


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


def _joint(
    config: PrivacyConfig,
    sampling: Sampling,
    mix: Mapping[float, int],
    delta: float,
    contributions: Contributions,
    order: int,
) -> float:
    """Noise scale / S that a round of noise factor 1 may cost in all."""
    per_sensitivity = sensitivity(1.0, config.adjacency, contributions, order=order)
    if config.epsilon is None:
        given = config.noise_multiplier or 0.0
        return given * (per_sensitivity if config.noise_relative_to == "sensitivity" else 1.0)
    release = Release(config.mechanism, sampling, config.adjacency, 1.0)
    return (
        _calibrated(config.epsilon, delta, tuple(mix.items()), release, config.backend)
        * per_sensitivity
    )


@lru_cache(maxsize=64)  # every release of a mix asks for the same number, which may take a second
def _calibrated(
    epsilon: float, delta: float, mix: tuple[tuple[float, int], ...], release: Release, backend: str
) -> float:
    from fedrec.privacy.accounting.calibration import calibrate  # pulls in scipy

    return calibrate(epsilon, delta, dict(mix), release, backend=backend)


def _beside_a_count(joint: float, count_std: float) -> float:
    """Andrew et al. 2021, theorem 1: noise / S of the sum, so that sum and count together cost
    `joint`."""
    left = joint**-2 - (2 * count_std) ** -2
    if left <= 0:
        raise ExperimentError(
            "the count of adaptive clipping alone costs more than the whole round may",
            expected=f"noise on the count with standard deviation > {joint / 2:g}",
            got=f"{count_std:g}",
            fix=(
                "raise privacy.adaptive-clip.count-noise or the cohort, or lower the noise"
                " multiplier"
            ),
        )
    return left**-0.5
