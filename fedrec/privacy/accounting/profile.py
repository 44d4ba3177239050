# SPDX-License-Identifier: Apache-2.0
"""A mechanism's own accountant: its privacy profile, the delta that it proves at each epsilon, of
one release or of all rounds of a phase together.

A profile that holds for all neighbours, in both directions, is that of one symmetric pair of
distributions of the loss (Zhu, Dong and Wang 2022, proposition 8), so that it composes with
everything else in the ledger and is amplified by sampling like noise whose distributions are known.
Between the points of a grid the profile is made linear in e^epsilon, above the true convex one.
What is stated need not be convex, as the best of several bounds is not: the true profile is below
it and convex, hence below its greatest convex minorant.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedrec.errors import ComponentError
from fedrec.privacy.accounting.noise_pair import NoisePair

_POINTS = 2**14
_LARGEST = 512.0  # epsilon beyond which what remains of delta counts as certain to be seen
_NOTHING = 1e-18
_ROUNDING = 1e-9
_FAR = 1e299


class _Masses(NamedTuple):
    """Losses `[points]`, and the masses of P and Q at them, `[points]` each."""

    losses: np.ndarray
    of_p: np.ndarray
    of_q: np.ndarray


class Profile(NoisePair):
    """What a release costs, in place of the distributions of its noise; a subclass defines
    `delta`.

    Args:
        multiplier: noise scale / sensitivity.
        own: numbers of the mechanism's own, from `Mechanism.own` or as set by its `releases`.
    """

    tight = False

    @abstractmethod
    def delta(self, epsilon: np.ndarray) -> np.ndarray:
        """An upper bound on delta at each epsilon >= 0, `[n]`, without sampling: probabilities that
        do not increase with epsilon."""

    def above(self, x: np.ndarray, centre: float) -> np.ndarray:
        """Mass of Q (centre 0) or P (centre 1) at losses above x."""
        mass = self._masses.of_p if centre else self._masses.of_q
        sums = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        return sums[np.searchsorted(self._masses.losses, x, side="right")]

    def between(self, lower: np.ndarray, upper: np.ndarray, centre: float) -> np.ndarray:
        """Mass of Q (centre 0) or P (centre 1) at losses in (lower, upper]."""
        mass = self._masses.of_p if centre else self._masses.of_q
        first = np.searchsorted(self._masses.losses, lower, side="right")
        last = np.searchsorted(self._masses.losses, upper, side="right")
        below = np.append(0.0, np.cumsum(mass))
        right = self.above(lower, centre) - self.above(upper, centre)
        return np.maximum(np.where(lower >= 0, right, below[last] - below[first]), 0.0)

    def place(self, log_ratio: np.ndarray) -> np.ndarray:
        """The loss itself, of which P and Q are distributions."""
        return np.where(log_ratio <= -_FAR, -np.inf, log_ratio)

    def log_ratio(self, x: float) -> float:
        return x

    def reach(self, mass: float) -> float:
        beyond = np.cumsum(self._masses.of_p[-2:_POINTS:-1]) <= mass  # the last loss is infinite
        return max(float(self._masses.losses[-2 - int(beyond.sum())]), _ROUNDING)

    def moments(self) -> tuple[float, float]:
        losses, of_p, _ = (part[1:-1] for part in self._masses)
        mean = float(losses @ of_p)
        return mean, max(float((losses - mean) ** 2 @ of_p), _ROUNDING)

    @property
    def pure_epsilon(self) -> float:
        """The smallest epsilon of the grid at which delta is 0."""
        epsilons, deltas = self._stated
        zero = np.flatnonzero(deltas == 0)
        return float(epsilons[zero[0]]) if len(zero) else float("inf")

    @cached_property
    def _stated(self) -> tuple[np.ndarray, np.ndarray]:
        """Epsilons `[n]`, from 0, and what is stated at them.

        Raises:
            ComponentError: it is no bound on a probability, rises, or claims that nothing at all
                is revealed.
        """
        span = 1.0
        while span < _LARGEST and self._checked(np.array([span]))[0] > _NOTHING:
            span *= 2
        epsilons = np.linspace(0.0, span, _POINTS + 1)
        deltas = self._checked(epsilons)
        rises = float(np.diff(deltas).max())
        if rises > _ROUNDING:
            raise self._wrong("a delta that does not rise with epsilon", f"a rise by {rises:.3g}")
        if deltas[0] == 0:
            raise self._wrong("a positive delta at epsilon 0", "0: perfect secrecy")
        return epsilons, np.minimum.accumulate(deltas)

    def _checked(self, epsilons: np.ndarray) -> np.ndarray:
        deltas = np.asarray(self.delta(epsilons), dtype=np.float64)
        if deltas.shape != epsilons.shape or not ((deltas >= 0) & (deltas <= 1)).all():
            wrong = deltas[~((deltas >= 0) & (deltas <= 1))].ravel()
            got = f"{wrong[0]:g}" if len(wrong) else f"shape {deltas.shape}"
            raise self._wrong(f"probabilities of shape {epsilons.shape}", got)
        return deltas

    @cached_property
    def _masses(self) -> _Masses:
        """The pair with the best profile that the stated one proves: masses at the losses of the
        grid and their opposites, and at infinite loss."""
        from scipy.optimize import isotonic_regression  # importing it is slow

        epsilons, deltas = self._stated
        x = np.exp(epsilons)
        # a delta at one epsilon bounds the total variation, which is the delta at 0
        deltas = deltas.copy()
        deltas[0] = np.min(deltas + (1 - deltas) * (x - 1) / (x + 1))
        widths = np.diff(x)
        slopes = isotonic_regression(np.diff(deltas) / widths, weights=widths).x
        # Q above each interval's losses is minus the slope there
        of_q = np.maximum(np.diff(np.append(slopes, 0.0)), 0.0)
        of_p = x[1:] * of_q
        certain = float(deltas[-1])
        rest = max(0.0, 1.0 - float(of_q.sum() + of_p.sum()) - certain)
        return _Masses(
            np.concatenate([[-_FAR], -epsilons[:0:-1], epsilons, [_FAR]]),
            np.concatenate([[0.0], of_q[::-1], [rest], of_p, [certain]]),
            np.concatenate([[certain], of_p[::-1], [rest], of_q, [0.0]]),
        )

    def _wrong(self, expected: str, got: str) -> ComponentError:
        return ComponentError(
            f"the profile of {type(self).__name__} is none",
            expected=expected,
            got=got,
            fix="correct `delta`: an upper bound on delta at each epsilon",
        )
