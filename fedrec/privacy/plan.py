# SPDX-License-Identifier: Apache-2.0
"""Sampler, clip, noise and accounting event of a run as one frozen value, so that they cannot
disagree.

The sum of the clipped updates of a cohort gets noise once, is divided by a fixed denominator, and
only then goes through the strategy's rule, which is post-processing. Every client counts the same:
a sum weighted by numbers of examples has no bounded sensitivity. A client that fails or sends no
numbers counts as a zero update; the denominator stays.

Where this differs from the paper (PrivRec algorithm 2): line 9 scales the mean by alpha2 but not
its noise, so that the noise multiplier really is z / alpha2. Here noise comes first;
`paper-noise-order` adds the noise of line 9, by making the sum's noise 1 / alpha2 times as large,
and accounts for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting import sampling as samplings
from fedrec.privacy.accounting.events import (
    TRAINING,
    CorrelatedRounds,
    Event,
    NoisyRound,
    NonPrivate,
)
from fedrec.privacy.accounting.sampling import Full, Sampling, Scheduled
from fedrec.privacy.adjacency import Contributions
from fedrec.privacy.clipping import Clip
from fedrec.privacy.config import Mix, PrivacyConfig
from fedrec.privacy.mechanisms.base import Mechanism
from fedrec.privacy.noise_multiplier import (
    count_multiplier,
    count_noise_std,
    default_delta,
    noise_per_clip_norm,
    refuse_unshareable,
)
from fedrec.privacy.protection import Protection


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
        clip: the present clip of clients' updates; the plan's sensitivity is that of the clip.
        per_clip_norm: noise scale of the sum / S. With `local`, of one client's upload.
        delta: the additive term of the guarantee.
        malicious: number of clients that an adversary made up; the guarantee is of the others.
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
        server_lr: float = 1.0,
        factor: float = 1.0,
        mix: Mix | None = None,
        contributions: Contributions = "signed",
        schedule: Scheduled | None = None,
        phase_rounds: int | None = None,
        known: bool = False,
        malicious: int = 0,
    ) -> Plan:
        """The plan of an experiment.

        Args:
            config: the `[privacy]` table.
            sampler: name of the sampler.
            settings: the sampler's settings, with `cohort`.
            clients: number of clients that may be drawn (N).
            rounds: number of rounds (T); a target epsilon is for all of them.
            server_lr: the strategy's learning rate (alpha2), which only `paper-noise-order` needs.
            factor: the noise multiplier is this factor times that of the settings.
            mix: parts of the run, if there are several; default: all rounds are equal.
            contributions: `non-negative` only for contributions that are so by construction, see
                `fedrec.privacy.adjacency`.
            schedule: what the sampler guarantees, if it is not one of fedrec's three.
            phase_rounds: number of rounds with this plan; default: all.
            known: whether who takes part depends on more than the sampler, or may be known.
            malicious: number of clients that an adversary made up, see
                `fedrec.privacy.accounting.sampling.of_sampler`.

        Raises:
            ExperimentError: the settings do not fit together, or no noise reaches the target
                epsilon.
            ComponentError: the mechanism states less than its rounds cost.
        """
        if clients < 1 or rounds < 1:
            raise ExperimentError(
                "no clients or no rounds",
                expected="at least one client and one round",
                got=f"{clients} and {rounds}",
                fix="set rounds, or choose a split with training clients",
            )
        mechanism = config.noise()
        sampling, denominator = samplings.of_sampler(
            sampler, dict(settings), clients, schedule, known=known, malicious=malicious
        )
        if config.placement == "local":
            sampling = Full()  # the server sees who takes part and each single upload
        samplings.refuse_unproven(sampling, config.adjacency)
        _refuse_other_cohorts(mechanism, sampling, sampler)
        refuse_unshareable(config, sampler, denominator)
        honest = max(1, clients - malicious)
        delta = default_delta(honest) if config.delta is None else config.delta
        clip = config.clip(contributions)
        noise = noise_per_clip_norm(
            config,
            clip,
            sampling,
            ((factor, rounds),) if mix is None else mix,
            delta,
            denominator=denominator,
            server_lr=server_lr,
            factor=factor,
        )
        own = rounds if phase_rounds is None else phase_rounds
        population = sampling, clients, rounds, own, denominator
        plan = cls(config, mechanism, *population, clip, noise, delta, malicious)
        plan._refuse_understated()
        return plan

    def _refuse_understated(self) -> None:
        """Refuse a mechanism whose stated cost cannot be true."""
        # pulls in scipy.linalg
        from fedrec.privacy.mechanisms._least_cost import refuse_understated

        refuse_understated(
            self.mechanism,
            self.sampling,
            self.config.adjacency,
            self.noise_multiplier,
            max(1, self.phase_rounds),
            self.delta,
        )

    def at_clip_norm(self, clip_norm: float) -> Plan:
        """The same plan at another clip norm (adaptive clipping): same multipliers, noise in
        proportion."""
        return replace(self, clip=self.clip.at(clip_norm))

    def protection(self, names: Iterable[str]) -> Protection:
        """Clip and noise of each client's update, as part of its order.

        Raises:
            ExperimentError: a pattern of the settings fits no parameter.
        """
        return Protection.of(
            self.config, self.clip, self.trained(names), noise_scale=self.client_noise_scale
        )

    @property
    def honest(self) -> int:
        """Number of clients that may be drawn and that no adversary made up, at least 1."""
        return max(1, self.clients - self.malicious)

    @property
    def clip_norm(self) -> float:
        """The present clip norm S."""
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
        """Scale of the noise that is accounted (of the sum; of one upload when local): std, or
        Laplace's b."""
        return self.per_clip_norm * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation, per coordinate, of the guaranteed noise in the sum, in the round in
        which it is largest."""
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
        """Scale of what each client adds to its clipped update; 0 when the server does.

        A share of distributed noise is sized so that all but `max-dropouts` clients together add
        `noise_scale`.
        """
        if self.config.placement == "central":
            return 0.0
        if self.config.placement == "local":
            return self.noise_scale
        return self.noise_scale / math.sqrt(self.denominator - self.config.max_dropouts)

    def clip_of_sum(self, clients: int, coordinates: int) -> Clip:
        """The clip that a sum of the uploads of so many clients is within: their updates' clip
        norms and the noise that they add themselves (longer with a probability of at most e^-72).
        """
        updates = self.clip_norm * clients
        scale = self.client_noise_scale
        noise = self.mechanism.longest(scale, clients, coordinates) if scale else 0.0
        return self.clip.at(updates + noise)

    def missing_noise_std(self, answered: int) -> float:
        """Missing distributed noise if only the given number of clients replied; 0 for up to
        `max-dropouts` failures."""
        if self.config.placement != "distributed":
            return 0.0
        needed = self.denominator - self.config.max_dropouts
        return self.noise_scale * math.sqrt(max(0.0, needed - answered) / needed)

    @property
    def count_noise_std(self) -> float | None:
        """Standard deviation of the noise on the count of unclipped clients; None without adaptive
        clipping."""
        return count_noise_std(self.config, self.denominator)

    @property
    def budget(self) -> float | None:
        """Epsilon that must not be exceeded after any round."""
        return self.config.budget if self.config.epsilon is None else self.config.epsilon

    def event(self, phase: str = TRAINING) -> Event:
        """What a round of a phase is charged for; of correlated noise, the first one for all."""
        if not self.config.covers(phase):
            return NonPrivate(f"phase {phase!r} learns from users' data without noise", phase)
        if self.noise_multiplier == 0:
            return NonPrivate("the noise multiplier is 0", phase)
        mechanism = self.mechanism
        adjacency = self.config.adjacency
        if mechanism.correlated:
            one = mechanism.release(self.sampling, adjacency, self.noise_multiplier)
            counted = mechanism.releases(one, self.phase_rounds, self.sampling)
            rounds = self.phase_rounds
            return CorrelatedRounds(
                mechanism.name, adjacency, rounds, tuple(counted.items()), phase
            )
        count = count_multiplier(self.config, self.denominator)
        kind = mechanism.name, self.sampling, adjacency
        return NoisyRound(*kind, self.noise_multiplier, count, phase, mechanism.own)

    def trained(self, names: Iterable[str]) -> list[str]:
        """The parameters that are trained and released under noise; the others stay as they are.

        Raises:
            ExperimentError: a pattern fits no parameter.
        """
        names = list(names)
        for pattern in self.config.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ExperimentError(
                    f"no parameter fits the pattern {pattern!r} of 'privacy.parameters'",
                    expected="patterns of the model's parameters",
                    got=repr(pattern),
                    fix=did_you_mean(pattern, names),
                )
        return [
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in self.config.parameters)
        ]


def _refuse_other_cohorts(mechanism: Mechanism, sampling: Sampling, sampler: str) -> None:
    """Refuse a sampler for which the cost of the mechanism is not known."""
    if not mechanism.fits(sampling):
        raise ExperimentError(
            f"no cost, nor privacy amplification, is proven for the mechanism {mechanism.name!r}"
            f" and the sampler {sampler!r}",
            expected=mechanism.needs,
            got=f"{sampler!r}: {sampling}",
            fix="set another sampler.name, or another privacy.mechanism",
        )
