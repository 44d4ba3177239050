# SPDX-License-Identifier: Apache-2.0
"""The privacy of a run: the `[privacy]` table of an experiment, and the plan that follows from it
(sampler, clip, noise and accounting event)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config, did_you_mean, fits
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting import sampling as samplings
from fedrec.privacy.accounting.accountant import calibrate
from fedrec.privacy.accounting.events import (
    DEFAULT_BACKEND,
    GAUSSIAN,
    TRAINING,
    BackendName,
    CorrelatedRounds,
    Event,
    NoisyRound,
    NonPrivate,
    Release,
)
from fedrec.privacy.accounting.sampling import Adjacency, Contributions, Full, Sampling, Scheduled
from fedrec.privacy.clipping import Clip, Protection
from fedrec.privacy.mechanisms import Mechanism, Placement, cost_of, longest_noise, mechanism_of

# The `[privacy]` table of an experiment.

Mix = tuple[tuple[float, int], ...]
"""Noise factor and number of rounds of each part of a run: one target epsilon is for all."""


class PhaseConfig(Config):
    """Settings of one phase of a run, such as `popularity`; default: those of `[privacy]`."""

    clip_norm: float | None = Field(default=None, ge=1e-9)
    """Bound on the norm of a client's update in this phase."""
    parameters: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns of the parameters that are trained and released in this phase."""
    noise_factor: float = Field(default=1.0, gt=0)
    """Noise multiplier of this phase relative to phases without a factor; a target epsilon is for
    all phases together."""


class Budget(Config):
    """Noise of a number of rounds, and their privacy guarantee.

    Exactly one of `noise-multiplier` and `epsilon` is given.
    """

    noise_multiplier: float | None = Field(default=None, ge=0)
    """Noise multiplier z, noise scale / sensitivity, which is 2S under replace-one (PrivRec) and S
    under add-remove; 0: clipping without noise, and epsilon is infinite."""
    epsilon: float | None = Field(default=None, gt=0)
    """Target epsilon for all rounds together, to which the noise is calibrated; rounds that would
    exceed it are not run."""
    delta: float | None = Field(default=None, ge=0, le=0.1)
    """Additive term of the guarantee: any set of outcomes is at most e^epsilon times as probable as
    on neighbouring data, plus delta; 0 with Laplace only; default: the smaller of
    N^-1.1 and 1e-5."""
    mechanism: str | dict[str, Any] = "gaussian"
    """The noise: a name (`fedrec list mechanism`), or a table with name and settings; `laplace`
    clips in the L1 norm, which costs far more noise in many dimensions."""
    adjacency: Adjacency = "replace-one"
    """Neighbours differ in all data of one client: `replace-one` (fixed-size cohorts), `add-remove`
    (Poisson)."""
    backend: BackendName = DEFAULT_BACKEND
    """Accountant; both give valid upper bounds, and pld is tighter."""

    @model_validator(mode="after")
    def _has_noise_or_a_target(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("exactly one of noise-multiplier and epsilon")
        return self


class PrivacyConfig(Budget):
    """User-level differential privacy of an experiment.

    Exactly one of `noise-multiplier` and `epsilon` is given.
    """

    clip_norm: float = Field(ge=1e-9)
    """Clip norm S of a client's whole update, in the norm of the mechanism (L2; L1 for Laplace)."""
    mode: Literal["reproducible", "secure"] = "reproducible"
    """`reproducible`: noise from the seed, a simulation; `secure`: from the operating system's
    generator."""
    placement: Placement = "central"
    """Where noise is added: on the server (`central`); a share on each client (`distributed`; the
    server must see only the sum); in full on each client (`local`)."""
    max_dropouts: int = Field(default=0, ge=0)
    """With `distributed`: number of clients of a cohort that may fail without loss of the
    guarantee."""
    parameters: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Patterns of the parameters that are trained and released with noise; all others are
    frozen."""
    phases: dict[str, PhaseConfig] = Field(default_factory=dict)
    """Settings of single phases by name (of `two-stage`, `popularity-start`, `means-start`)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_dropouts > 0 and self.placement != "distributed":
            raise ValueError("max-dropouts only with placement = 'distributed'")
        if self.placement == "local" and self.adjacency == "add-remove":
            raise ValueError(
                "adjacency = 'replace-one' with placement = 'local': the server sees who takes part"
            )
        return self

    def in_phase(self, phase: str) -> PrivacyConfig:
        """Settings of one phase of a run, with its changes in `phases`, except the noise factor."""
        phase_config = self.phases.get(phase, PhaseConfig())
        changes = {"clip_norm": phase_config.clip_norm, "parameters": phase_config.parameters}
        return self.model_copy(
            update={key: value for key, value in changes.items() if value is not None}
        )

    def clip(self, contributions: Contributions = "signed") -> Clip:
        """Clip of clients' updates, in the norm of the mechanism."""
        return Clip(self.clip_norm, self.noise().order, contributions)

    def protection(self, clip: Clip, names: Iterable[str], noise_scale: float) -> Protection:
        """Clip of clients' updates, limited to the named parameters, and noise of that scale."""
        return Protection(
            clip_norm=clip.norm,
            order=clip.order,
            names=tuple(names),
            noise_scale=noise_scale,
            mechanism=self.mechanism,
            silent=self.mode == "secure",
        )

    def noise(self) -> Mechanism:
        """Import and return the mechanism.

        Raises:
            ExperimentError: it or one of its settings is unknown, or contradicts the other
                settings.
        """
        mechanism = mechanism_of(self.mechanism)
        wrong = {}
        if self.delta == 0 and mechanism.order == 2:
            wrong["delta"] = "delta > 0"
        if self.placement not in mechanism.placements:
            wrong["placement"] = " or ".join(mechanism.placements)
        for key, expected in wrong.items():
            raise ExperimentError(
                f"wrong value for 'privacy.{key}'",
                expected=f"{expected} with the mechanism {mechanism.name!r}",
                got=repr(self.table()[key]),
                fix="change it, or choose another privacy.mechanism (fedrec list mechanism)",
            )
        return mechanism

    def resolved(self) -> PrivacyConfig:
        """Return the settings with the mechanism's defaults filled in.

        Raises:
            ExperimentError: see `noise`.
        """
        mechanism = self.noise()
        settings = mechanism.config.table()
        chosen = {"name": mechanism.name, **settings} if settings else mechanism.name
        return self.model_copy(update={"mechanism": chosen})

    def noise_factor(self, phase: str) -> float:
        """Noise multiplier of a phase relative to a phase without a factor."""
        return self.phases.get(phase, PhaseConfig()).noise_factor

    def noise_mix(self, phases: Iterable[str]) -> Mix:
        """Noise factor and number of rounds of each phase, for calibration.

        Args:
            phases: the phase of each round of the experiment.
        """
        counted = ((phase, sum(1 for _ in rounds)) for phase, rounds in groupby(phases))
        return tuple((self.noise_factor(phase), number) for phase, number in counted)


# The noise of a `[privacy]` table in units of the clip norm: given or calibrated.

_SOME = 1e-9  # clip norms


def default_delta(clients: int) -> float:
    """The smaller of N^-1.1 and 1e-5."""
    return min(float(clients) ** -1.1, 1e-5)


def least_client_noise(
    config: PrivacyConfig, clip: Clip, mix: Mix, *, factor: float = 1.0, cohort: float | None = None
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
    from fedrec.privacy.accounting.rdp import gdp_parameter  # pulls in scipy

    if config.placement == "central":
        return 0.0
    some = clip.norm * _SOME
    if config.epsilon is None:
        unit = clip.sensitivity(config.adjacency)
        scale = factor * ((config.noise_multiplier or 0.0) * unit)
        if config.placement == "local":
            return scale
        return (
            min(scale, some)
            if cohort is None
            else scale / math.sqrt(max(1.0, cohort - config.max_dropouts))
        )
    if config.placement == "distributed" or config.noise().name != GAUSSIAN:
        return some
    delta = default_delta(1) if config.delta is None else config.delta
    releases = sum(count / other**2 for other, count in mix)
    unit = clip.sensitivity(config.adjacency) / gdp_parameter(config.epsilon, delta)
    return factor * math.sqrt(releases) * unit


def _check_shares(config: PrivacyConfig, sampler: str, denominator: float) -> None:
    """Check that the clients' shares of distributed noise add up to enough.

    Raises:
        ExperimentError: the cohort size is unknown, or all clients of a cohort may fail.
    """
    if config.placement != "distributed":
        return
    if sampler == "poisson":
        raise ExperimentError(
            "distributed noise needs a cohort of known size: a small Poisson cohort would add too"
            " little noise",
            fix="set sampler.name = 'fixed-size', or privacy.placement = 'central'",
        )
    if config.max_dropouts >= denominator:
        raise ExperimentError(
            "wrong value for 'privacy.max-dropouts'",
            expected=f"fewer than the {denominator:g} clients of a cohort",
            got=str(config.max_dropouts),
            fix=f"set privacy.max-dropouts = {int(denominator) - 1} or less",
        )


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
    drawn = sampling, adjacency

    def releases(multiplier: float) -> dict[Release, int]:
        total: Counter[Release] = Counter()
        for factor, rounds in mix:
            total.update(cost_of(mechanism, multiplier * factor, rounds, *drawn))
        return dict(total)

    return calibrate(epsilon, delta, releases, backend=backend)


# Sampler, clip, noise and accounting event of a run as one frozen value, so that they cannot
# disagree.
#
# The sum of the clipped updates of a cohort gets noise once, is divided by a fixed denominator, and
# only then goes through the strategy's rule, which is post-processing. Every client counts the
# same: a sum weighted by numbers of examples has no bounded sensitivity. A client that fails or
# sends no numbers counts as a zero update; the denominator stays.
#
# Where this differs from the paper (PrivRec algorithm 2): line 9 scales the mean by alpha2 but not
# its noise, so that the noise multiplier really is z / alpha2. Here noise comes first.


@dataclass(frozen=True)
class Plan:
    """Clip, noise and cost of a round's updates.

    Attributes:
        config: the settings.
        mechanism: the noise.
        sampling: how cohorts are drawn.
        clients: number of clients that may be drawn (N).
        rounds: number of rounds of the experiment (T).
        phase_rounds: number of rounds with this plan.
        denominator: denominator of sums: M, qN under Poisson sampling, N with all clients.
        clip: clip of clients' updates; the plan's sensitivity is that of the clip.
        per_clip_norm: noise scale of the sum / S. With `local`, of one client's upload.
        delta: the additive term of the guarantee.
        malicious: number of an adversary's fake clients; the guarantee is for the others.
    """

    config: PrivacyConfig
    mechanism: Mechanism
    sampling: Sampling
    clients: int
    rounds: int
    phase_rounds: int
    denominator: float
    clip: Clip
    per_clip_norm: float
    delta: float
    malicious: int = 0

    @classmethod
    def of(
        cls,
        config: PrivacyConfig,
        sampler: str,
        settings: Mapping[str, Any],
        clients: int,
        rounds: int,
        *,
        factor: float = 1.0,
        mix: Mix | None = None,
        contributions: Contributions = "signed",
        schedule: Scheduled | None = None,
        phase_rounds: int | None = None,
        known: bool = False,
        malicious: int = 0,
    ) -> Plan:
        """Make the plan of an experiment.

        Args:
            config: the `[privacy]` table.
            sampler: name of the sampler.
            settings: the sampler's settings, with `cohort`.
            clients: number of clients that may be drawn (N).
            rounds: number of rounds (T); a target epsilon is for all of them.
            factor: the noise multiplier is this factor times that of the settings.
            mix: parts of the run, if there are several; default: all rounds are equal.
            contributions: `non-negative` only for contributions that are so by construction, see
                `fedrec.privacy.accounting.sampling`.
            schedule: participation bound, of samplers other than fedrec's three.
            phase_rounds: number of rounds with this plan; default: all.
            known: whether participation depends on more than the sampler, or may be known.
            malicious: number of an adversary's fake clients, see
                `fedrec.privacy.accounting.sampling.of_sampler`.

        Raises:
            ExperimentError: the settings contradict each other, or no noise reaches the target
                epsilon.
        """
        if clients < 1 or rounds < 1:
            raise ExperimentError(
                f"at least one client and one round, not {clients} and {rounds}",
                fix="set rounds, or choose a split with training clients",
            )
        mechanism = config.noise()
        sampling, denominator = samplings.of_sampler(
            sampler, dict(settings), clients, schedule, known=known, malicious=malicious
        )
        if config.placement == "local":
            sampling = Full()  # the server sees who takes part and each single upload
        samplings.check_proven(sampling, config.adjacency)
        mechanism.dp_event(1.0, 1, sampling)  # refuses cohorts for which its cost is not known
        _check_shares(config, sampler, denominator)
        honest = max(1, clients - malicious)
        delta = default_delta(honest) if config.delta is None else config.delta
        clip = config.clip(contributions)
        multiplier = config.noise_multiplier or 0.0
        if config.epsilon is not None:
            target = config.epsilon, delta, config.backend
            mix = ((factor, rounds),) if mix is None else mix
            multiplier = _calibrated(*target, mix, mechanism, sampling, config.adjacency)
        noise = factor * (multiplier * clip.at(1.0).sensitivity(config.adjacency))
        planned = rounds if phase_rounds is None else phase_rounds
        population = sampling, clients, rounds, planned, denominator
        return cls(config, mechanism, *population, clip, noise, delta, malicious)

    def at_clip_norm(self, clip_norm: float) -> Plan:
        """Return the plan at another clip norm: same multipliers, noise in proportion."""
        return replace(self, clip=self.clip.at(clip_norm))

    def protection(self, names: Iterable[str]) -> Protection:
        """Clip and noise of each client's update, as part of its order.

        Raises:
            ExperimentError: a pattern of the settings matches no parameter.
        """
        return self.config.protection(self.clip, self.trained(names), self.client_noise_scale)

    @property
    def honest(self) -> int:
        """Number of clients that may be drawn without an adversary's fake ones, at least 1."""
        return max(1, self.clients - self.malicious)

    @property
    def clip_norm(self) -> float:
        """Clip norm S."""
        return self.clip.norm

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the sum under the plan's adjacency, in the norm of the clip."""
        return self.clip.sensitivity(self.config.adjacency)

    @property
    def noise_multiplier(self) -> float:
        """Noise scale / sensitivity, under the plan's adjacency."""
        return self.per_clip_norm / self.clip.at(1.0).sensitivity(self.config.adjacency)

    @property
    def noise_scale(self) -> float:
        """Scale of the accounted noise (of the sum; of one upload when local): std, or Laplace's
        b."""
        return self.per_clip_norm * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation, per coordinate, of the guaranteed noise in the sum; the largest of
        all rounds."""
        std = self.noise_scale * self.mechanism.std
        return std * math.sqrt(self.denominator) if self.config.placement == "local" else std

    @property
    def mean_noise_std(self) -> float:
        """Standard deviation, per coordinate, of the noise in the mean."""
        return self.noise_std / self.denominator

    @property
    def server_noise_scale(self) -> float:
        """Scale of the server's noise on the sum; 0 if the clients add the noise."""
        return self.noise_scale if self.config.placement == "central" else 0.0

    @property
    def client_noise_scale(self) -> float:
        """Scale of the noise that each client adds to its clipped update; 0 if the server adds it.

        A share of distributed noise is sized so that all but `max-dropouts` clients together add
        `noise_scale`.
        """
        if self.config.placement == "central":
            return 0.0
        if self.config.placement == "local":
            return self.noise_scale
        return self.noise_scale / math.sqrt(self.denominator - self.config.max_dropouts)

    def clip_of_sum(self, clients: int, coordinates: int) -> Clip:
        """Bound on a sum of the uploads of `clients` clients: their clip norms and their own noise
        (exceeded with a probability of at most e^-72).
        """
        updates = self.clip_norm * clients
        scale = self.client_noise_scale
        noise = longest_noise(self.clip.order, scale, clients, coordinates)
        return self.clip.at(updates + noise)

    def missing_noise_std(self, answered: int) -> float:
        """Missing distributed noise if only the given number of clients replied; 0 for up to
        `max-dropouts` failures."""
        if self.config.placement != "distributed":
            return 0.0
        needed = self.denominator - self.config.max_dropouts
        return self.noise_scale * math.sqrt(max(0.0, needed - answered) / needed)

    def event(self, phase: str = TRAINING) -> Event:
        """Event charged for a round of a phase; for the first one of all if noise is correlated."""
        if self.noise_multiplier == 0:
            return NonPrivate("the noise multiplier is 0", phase)
        mechanism = self.mechanism
        adjacency = self.config.adjacency
        rounds = self.phase_rounds
        drawn = self.sampling, adjacency
        counted = cost_of(mechanism, self.noise_multiplier, rounds, *drawn)
        (release, times), *others = counted.items()
        if others or times != rounds:  # the rounds have no cost by themselves
            return CorrelatedRounds(
                mechanism.name, adjacency, rounds, tuple(counted.items()), phase
            )
        return NoisyRound(release.mechanism, *drawn, release.noise_multiplier, phase=phase)

    def trained(self, names: Iterable[str]) -> list[str]:
        """Names of the parameters trained and released with noise; the others are frozen.

        Raises:
            ExperimentError: a pattern matches no parameter.
        """
        names = list(names)
        for pattern in self.config.parameters:
            if not any(fits(name, (pattern,)) for name in names):
                raise ExperimentError(
                    f"no parameter matches the pattern {pattern!r} of 'privacy.parameters'",
                    fix=did_you_mean(pattern, names),
                )
        return [name for name in names if fits(name, self.config.parameters)]
