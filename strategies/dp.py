# SPDX-License-Identifier: Apache-2.0
"""User-level differential privacy around any additive strategy (DP-FedAvg; PrivRec section 2.3,
algorithm 2).

In a round every client clips its whole update, the nodes add them, noise is added once to the sum
on every coordinate, and the strategy applies the noisy sum over a fixed denominator: its learning
rate scales signal and noise alike, which costs no privacy. Each round is charged before its noise
is drawn.

Failures count as zero updates: a client whose update is not finite, a node whose reply is late or
invalid. The denominator stays the same, and no other client is sampled instead. The server also
bounds the norm of a node's sum: the clip norm times the number of its clients in the cohort (one,
for a phone), plus the norm of the noise that they add, so that no node changes the sum by more than
its clients may.

Where this differs from the paper: see `fedrec.privacy.plan` for the order of noise and learning
rate, and `fedrec.privacy.clipping` for when updates are clipped.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedrec.privacy import mechanisms
from fedrec.privacy.plan import Plan
from fedrec.protocol.messages import TrainSum
from fedrec.protocol.updates import Change, SparseUpdate, added, dense_change, numbers_in, scaled
from fedrec.rng import NoiseSource

log = logging.getLogger("fedrec")


class DpFedAvg:
    """DP-FedAvg: clip, noise and charges of a strategy's rounds.

    Args:
        plan: sampler, clip, noise and denominator.
        phase: phase of the plan.
        source: source of the noise.
        charge: charges a round, by its number; called before the server draws its noise. If clients
            add the noise, the guard charges instead, before their messages are sent.
        first: first round of the phase.
    """

    def __init__(
        self,
        plan: Plan,
        phase: str,
        source: NoiseSource,
        charge: Callable[[int], None],
        first: int = 1,
    ) -> None:
        self.plan = plan
        self.phase = phase
        self.source = source
        self.charge = charge
        self.first = first
        self.memory: dict[str, np.ndarray] = {}
        """Noise of earlier rounds that the mechanism saves; secret."""
        self._warned = False

    def release(
        self,
        round_number: int,
        theta: Mapping[str, np.ndarray],
        sums: Sequence[tuple[TrainSum, int]],
    ) -> dict[str, Change]:
        """Noisy sum of a round; parameters that are not trained under noise do not change.

        Args:
            round_number: the round.
            theta: the parameters that the clients started from.
            sums: reply of each node, with the number of its clients in the cohort, in node order.
        """
        # otherwise the guard charged it before the messages were sent
        if not self.plan.client_noise_scale:
            self.charge(round_number)
        names = self.plan.trained(theta)
        bounded = [self._bounded(reply.total, names, theta, asked) for reply, asked in sums]
        total = {name: _total(name, bounded, theta) for name in names}
        self._warn_of_idle(round_number, total)
        # a node may report any number of clients
        answered = sum(min(max(reply.clients, 0), asked) for reply, asked in sums)
        released = self._noisy(round_number, total, theta, answered)
        return {name: released.get(name, _nothing(value)) for name, value in theta.items()}

    @property
    def hides_cohorts(self) -> bool:
        """True if the cohorts, and all counts of their clients, are secret."""
        return self.plan.config.mode == "secure"

    @property
    def keeps_noise(self) -> bool:
        """True if a resumed run needs `memory`: the noise of a round depends on that of earlier
        ones, and cannot be drawn again."""
        return self.plan.config.mode == "secure" and mechanisms.has_memory(self.plan.mechanism)

    def _draw_again(self, round_number: int, sizes: Mapping[str, int]) -> None:
        """Draw the noise of the phase's earlier rounds from the seed, if a resumed run lacks what a
        round depends on."""
        mechanism = self.plan.mechanism
        if self.memory or not mechanisms.has_memory(mechanism) or self.plan.config.mode == "secure":
            return
        for earlier in range(self.first, round_number):
            for name, size in sizes.items():
                mechanism.draw(name, size, self.memory, self.source, earlier)

    def _noisy(
        self,
        round_number: int,
        total: Mapping[str, Change],
        theta: Mapping[str, np.ndarray],
        answered: int,
    ) -> Mapping[str, Change]:
        """Add the server's noise to every coordinate of the sums; without server noise they stay
        unchanged, and sparse."""
        plan = self.plan
        missing = self.plan.missing_noise_std(answered)
        if not plan.server_noise_scale and not missing:
            return total
        whole = {name: dense_change(change) for name, change in total.items()}
        mechanism = plan.mechanism
        if plan.server_noise_scale:
            self._draw_again(round_number, {name: value.size for name, value in whole.items()})
        noisy = mechanisms.add_noise(
            mechanism, whole, plan.server_noise_scale, self.source, round_number, memory=self.memory
        )
        if missing:
            log.warning(
                "round %d: %d clients replied; the server adds the missing noise",
                round_number,
                answered,
            )
            # no client has an address of that form
            noisy = mechanisms.add_noise(mechanism, noisy, missing, self.source, round_number, 0, 0)
        return noisy

    def _warn_of_idle(self, round_number: int, total: Mapping[str, Change]) -> None:
        """Warn once about parameters with noise but no updates; not in secure mode, because sums
        are private."""
        idle = [name for name, change in total.items() if not numbers_in(change).any()]
        if idle and not self._warned and self.plan.config.mode == "reproducible":
            self._warned = True
            log.warning(
                "round %d, phase %r: no client changed %s, which get noise but no signal; leave"
                " them out of privacy.parameters (or of privacy.phases.%s.parameters)",
                round_number,
                self.phase,
                ", ".join(idle),
                self.phase,
            )

    def _bounded(
        self,
        total: Mapping[str, Change],
        names: Sequence[str],
        theta: Mapping[str, np.ndarray],
        asked: int,
    ) -> Mapping[str, Change]:
        """Scale a node's sum down to the largest norm that its clients' uploads can have; zero if
        it is invalid."""
        if not asked or not all(
            name in total and is_change(total[name], theta[name]) for name in names
        ):
            log.warning("unrequested, misshapen or non-finite sums are treated as zero")
            return {name: _nothing(theta[name]) for name in names}
        protected = {name: total[name] for name in names}
        numbers = sum(theta[name].size for name in names)
        clip = self.plan.clip_of_sum(asked, numbers)
        parts = {name: numbers_in(change) for name, change in protected.items()}
        return scaled(protected, clip.factor(parts))


def is_change(change: Change, table: np.ndarray) -> bool:
    """True if a change has the shape `[...]` of a table and finite values."""
    if not isinstance(change, SparseUpdate):
        return (
            change.shape == table.shape
            and change.dtype.kind == "f"
            and bool(np.isfinite(change).all())
        )
    rows = change.rows
    if rows.ndim != 1 or rows.dtype.kind != "i" or change.values.dtype.kind != "f":
        return False
    fits = change.shape == table.shape and change.values.shape == (len(rows), *table.shape[1:])
    inside = fits and (
        len(rows) == 0
        or (rows.min() >= 0 and rows.max() < len(table) and (np.diff(rows) > 0).all())
    )
    return bool(inside and np.isfinite(change.values).all())


def _total(
    name: str, sums: Sequence[Mapping[str, Change]], theta: Mapping[str, np.ndarray]
) -> Change:
    """Add the nodes' sums of a parameter, float64."""
    total: Change = _nothing(theta[name])
    for node_sum in sums:
        total = added(total, node_sum[name])
    return total


def _nothing(table: np.ndarray) -> Change:
    """Make a change of zero."""
    if table.ndim < 2:
        return np.zeros(table.shape)
    return SparseUpdate(table.shape, np.empty(0, dtype=np.int64), np.empty((0, *table.shape[1:])))
