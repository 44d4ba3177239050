# SPDX-License-Identifier: Apache-2.0
"""Accountant of privacy events with its backends, the ledger of a run, noise calibration, and the
cost of selecting settings by private results.

The backends are privacy loss distributions (the tightest bound here), Rényi differential privacy,
and PrivRec's printed values. Costs add over events and phases. One `NonPrivate` event makes the
total infinite; the epsilon of each phase is still reported, as if everything else were public.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedrec.errors import ComponentError, ExperimentError, FedrecError, RunError
from fedrec.privacy.accounting.events import (
    DEFAULT_BACKEND,
    GAUSSIAN,
    CorrelatedRounds,
    CoveredRound,
    Event,
    NoisyRound,
    NonPrivate,
    Release,
    from_record,
    releases_in,
    to_record,
)
from fedrec.privacy.accounting.rdp import (
    INTEGER_ORDERS,
    ORDERS,
    epsilon_of,
    pure_epsilon,
    unsampled,
)
from fedrec.privacy.accounting.sampling import FixedSize, Full
from fedrec.runtime.files import MOST_JSON, append_durably, parse_json

# RDP curves from autodp (Wang et al. 2019, Zhu and Wang 2019), turned into epsilon by our own tight
# conversion.
#
# Not used from autodp 0.2.3: `get_eps` (older conversion, epsilon too large by 0.3 to 0.7), the
# default bound for sampling without replacement (theorem 9, up to twice as large), orders above 100
# (there it falls back to that bound), its accountant's memory (a Poisson and a without-replacement
# release of one function are merged), and everything that goes through characteristic functions
# (silently negative). A new accountant is created for each curve. A curve is that of the improved
# bound at integer orders 2 to 64, computed once per kind of release.


def rdp_total(releases: Mapping[Release, int]) -> np.ndarray:
    """Rényi curve of all releases together at `ORDERS`, `float64 [orders]`; the last value is the
    pure epsilon."""
    total = np.zeros(len(ORDERS))
    for release, count in releases.items():
        total += count * _rdp_curve(release) if count else 0.0
    return total


@cache
def _rdp_curve(release: Release) -> np.ndarray:
    """Rényi curve of one release at `ORDERS`, `float64 [orders]`."""
    curve = unsampled(INTEGER_ORDERS.astype(np.float64), release)
    if not isinstance(release.sampling, Full):
        # Sampling never increases the cost; if autodp's bound does or overflows, the curve without
        # sampling is used.
        curve = np.fmin(_sampled_curve(release), curve)
    return np.append(curve, pure_epsilon(release))


def _sampled_curve(release: Release) -> np.ndarray:
    """Rényi curve of one release of a sample at the integer orders, `float64 [INTEGER_ORDERS]`."""
    from autodp.rdp_acct import anaRDPacct

    @cache  # autodp asks for each order a hundred times
    def rdp(order: float) -> float:
        return (
            float(unsampled(np.array([order], dtype=np.float64), release)[0]) if order > 1 else 0.0
        )

    accountant = anaRDPacct(m=INTEGER_ORDERS[-1])
    with np.errstate(all="ignore"):  # autodp takes logarithms of 0 on purpose
        if isinstance(release.sampling, FixedSize):
            accountant.compose_subsampled_mechanism(
                rdp, release.sampling.rate, improved_bound_flag=True
            )
            return accountant.RDPs_int[INTEGER_ORDERS - 1]  # `get_rdp` computes it again
        accountant.compose_poisson_subsampled_mechanisms(rdp, release.sampling.rate)
        return accountant.get_rdp(INTEGER_ORDERS)


_MOST_RELEASES = 10**9


def _pld(releases: Mapping[Release, int], delta: float) -> float:
    """Composed privacy loss distributions, see `fedrec.privacy.accounting.losses`.

    Raises:
        ExperimentError: more than 1e9 releases, as their rounding errors add up.
    """
    from fedrec.privacy.accounting.losses import composed_epsilon  # imports dp-accounting

    if sum(releases.values()) > _MOST_RELEASES:
        raise ExperimentError(
            "too many releases for the accountant 'pld'",
            expected=f"at most {_MOST_RELEASES:,} in total",
            got=f"{sum(releases.values()):,}",
            fix="use the accountant 'autodp'",
        )
    epsilon = composed_epsilon(tuple(releases.items()), delta)
    return math.inf if epsilon is None else epsilon


def attack_epsilon(releases: Mapping[Release, int], delta: float) -> float | None:
    """Epsilon that the best known attack reaches, to about three digits: no valid bound can be
    below it. None for more than 1e9 releases, whose rounding errors add up to too much, and for
    very little noise on samples.

    Without replacement and replace-one: all other clients upload -S, the target S or -S. Poisson
    and add-remove: the target uploads S, all others nothing.
    """
    from fedrec.privacy.accounting.losses import composed_epsilon  # imports dp-accounting

    if sum(releases.values()) > _MOST_RELEASES:
        return None
    return composed_epsilon(tuple(releases.items()), delta, attack=True)


# The epsilons printed in PrivRec's tables 4 and 5. For comparison only: this is not a valid
# accounting of the releases.
#
# All 36 finite cells are reproduced to the last digit if every client of every round is counted as
# a release of its own (M T releases sampled without replacement instead of T), with autodp's older
# bound (theorem 9 of Wang et al. 2019), the older conversion R(a) + ln(1/delta) / (a - 1) at the
# best integer order, cut off after four decimals.

_ORDERS = np.arange(2, 129)


def _paper(releases: Mapping[Release, int], delta: float) -> float:
    """Truncated to four decimals, as printed."""
    curve = np.zeros(len(_ORDERS))
    for release, count in releases.items():
        curve += count * _curve_of_all_clients(release)
    if delta == 0:
        return math.inf
    epsilons = curve + math.log(1 / delta) / (_ORDERS - 1)
    return math.floor(epsilons.min() * 1e4) / 1e4


@cache
def _curve_of_all_clients(release: Release) -> np.ndarray:
    sampling = release.sampling
    if release.mechanism != GAUSSIAN or not isinstance(sampling, FixedSize):
        raise ExperimentError(
            "accountant 'paper' supports only Gaussian noise and cohorts of fixed size",
            got=f"{release.mechanism} noise, {sampling}",
            fix="choose the backend autodp or pld",
        )
    from autodp.rdp_acct import anaRDPacct

    def rdp(order: float) -> float:
        return float(unsampled(np.array([order]), release)[0])

    accountant = anaRDPacct(m=len(_ORDERS) + 1)
    with np.errstate(all="ignore"):
        accountant.compose_subsampled_mechanism(rdp, sampling.rate, coeff=sampling.cohort)
        return accountant.get_rdp(_ORDERS)


@dataclass(frozen=True)
class _Backend:
    """A method to bound the epsilon of counted releases under one adjacency.

    Attributes:
        method: description for reports.
        epsilon: from the number of times of each release, and delta in [0, 1), the smallest epsilon
            >= 0 that the method proves for all together; infinite: none. Raises an ExperimentError
            if it has no bound for one of them.
    """

    method: str
    epsilon: Callable[[Mapping[Release, int], float], float]


_BACKENDS = {
    "autodp": _Backend(
        "RDP curves of autodp (improved bound, orders 2..64), conversion of Canonne, Kamath and"
        " Steinke",
        lambda releases, delta: float(epsilon_of(rdp_total(releases), delta)),
    ),
    "pld": _Backend(
        "privacy loss distribution of the dominating pair (connect the dots, FFT)", _pld
    ),
    "paper": _Backend(
        "as PrivRec's tables 4 and 5 (every client of a round counted as a release); for comparison"
        " only",
        _paper,
    ),
}


def _backend_of(name: str) -> _Backend:
    """Return the accountant `autodp`, `pld` or `paper`.

    Raises:
        ExperimentError: the name is unknown.
    """
    if name not in _BACKENDS:
        raise ExperimentError(f"unknown accountant {name!r}", fix=f"choose {', '.join(_BACKENDS)}")
    return _BACKENDS[name]


# The cost of choosing settings by their results on private data: the best of a random number of
# trials (Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy").
#
# A trial draws a setting, trains with it and is given a score; every trial is a draw from one
# mechanism. If their number K is random and only the best trial is published, the cost is that of
# one trial and a little more, however many there were. With R the Rényi curve of a trial, that of
# the choice at order a is at most
#
#     R(a) + ln(E[K]) / (a - 1) + (1 + shape) min over b of [(1 - 1/b) R(b) - ln(gamma) / b]
#
# for the truncated negative binomial distribution (theorem 2; shape 1 is geometric, 0 logarithmic).

Law = Literal["geometric", "logarithmic"]
LAWS: dict[str, float] = {"geometric": 1.0, "logarithmic": 0.0}
"""Distributions of the number of trials, and their shapes."""
MOST_TRIALS = 1000


@dataclass(frozen=True)
class RandomTrials:
    """A random number of trials.

    Attributes:
        law: its distribution.
        mean: its mean, from 1 (above 1 if logarithmic) to 1000.

    Raises:
        ExperimentError: the law is unknown, or the mean out of range.
    """

    law: Law
    mean: float

    def __post_init__(self) -> None:
        least = 1.001 if self.law == "logarithmic" else 1.0
        if self.law not in LAWS or not least <= self.mean <= MOST_TRIALS:
            raise ExperimentError(
                "unknown distribution for the number of trials",
                expected=f"{', '.join(LAWS)}, with a mean from {least:g} to {MOST_TRIALS}",
                got=f"{self.law}, {self.mean:g}",
                fix="--private-choice geometric --trials 20",
            )

    def draw(self, random: np.random.Generator) -> int:
        """Draw the number of trials K, which must not be published."""
        if self.law == "geometric":
            return int(random.geometric(1 / self.mean))
        return int(random.logseries(1 - self.gamma))

    @property
    def gamma(self) -> float:
        """Probability parameter of the truncated negative binomial distribution, in (0, 1]."""
        from scipy.optimize import brentq  # importing it is slow

        if self.law == "geometric":
            return 1 / self.mean

        def above(gamma: float) -> float:
            """Difference between the mean of the logarithmic distribution and `mean`."""
            return (1 / gamma - 1) / -math.log(gamma) - self.mean

        root: Any = brentq(above, 1e-9, 1 - 1e-9, xtol=1e-15)
        return float(root)

    def curve(self, trial: np.ndarray) -> np.ndarray:
        """Rényi curve of the best trial, `float64 [INTEGER_ORDERS]`, from that of one trial."""
        orders = INTEGER_ORDERS
        grown = trial + math.log(self.mean) / (orders - 1)
        best = ((1 - 1 / orders) * trial - math.log(self.gamma) / orders).min()
        # curves do not fall with the order, so that a later bound holds for earlier orders
        whole = grown + (1 + LAWS[self.law]) * best
        return np.minimum.accumulate(whole[::-1])[::-1]

    def epsilon(self, trial: np.ndarray, delta: float) -> float:
        """Epsilon of the best trial, from the Rényi curve `[INTEGER_ORDERS]` of one trial."""
        return float(epsilon_of(np.append(self.curve(trial), np.inf), delta))


_GRID = 2e-3  # relative error of values computed on a grid


@dataclass(frozen=True)
class Report:
    """Privacy cost of a set of releases.

    Attributes:
        epsilon: upper bound; infinite if an event was not private.
        delta: the additive term of the guarantee.
        method: description of the method.
        attack: epsilon that the best known attack reaches, a lower bound; None if it was not
            requested, or cannot be computed.
        phases: epsilon of each phase alone, in the order in which they began.
        events: number of events.
        caveats: limits of the guarantee, as sentences.
    """

    epsilon: float
    delta: float
    method: str
    attack: float | None
    phases: dict[str, float]
    events: int
    caveats: tuple[str, ...] = ()


class Accountant:
    """Counts events under one adjacency.

    Args:
        backend: name of the method: `autodp`, `pld` or `paper`.
    """

    def __init__(self, backend: str = DEFAULT_BACKEND) -> None:
        self.backend = _backend_of(backend)
        self._counts: Counter[Event] = Counter()

    def step(self, event: Event, n: int = 1) -> None:
        """Count an event n times.

        Raises:
            ExperimentError: the event's adjacency is not that of the events before.
        """
        _check_adjacencies([*self._counts, event])
        self._counts[event] += n

    def step_rounds(self, event: Event, rounds: int) -> None:
        """Count the charges of `rounds` rounds of a phase, the first of which has this event."""
        if isinstance(event, CorrelatedRounds) and rounds:
            self.step(event)
            self.step(CoveredRound(event.phase), rounds - 1)
        else:
            self.step(event, rounds)

    def epsilon(self, delta: float, *, attack: bool = False, caveats: Iterable[str] = ()) -> Report:
        """Total cost of all events so far.

        Args:
            delta: in [0, 1); at 0 only Laplace noise has a finite epsilon.
            attack: also compute the epsilon of the best known attack (a fraction of a second).
            caveats: sentences for the report.

        Raises:
            ComponentError: the attack exceeds the bound, which is therefore wrong.
            ExperimentError: delta is out of range, or the backend has no bound for an event.
        """
        _check(delta)
        epsilon = self._bound(self._counts, delta)
        phases = dict.fromkeys((event.phase for event in self._counts), epsilon)
        if len(phases) > 1:
            for phase in phases:
                of_phase = {e: count for e, count in self._counts.items() if e.phase == phase}
                phases[phase] = self._bound(of_phase, delta)
        method = self.backend.method
        reached = attack_epsilon(self.releases, delta) if attack else None
        if reached is not None:
            # both are computed on a grid, to about three digits
            if reached > epsilon * (1 + _GRID) + _GRID**2:
                raise ComponentError(
                    f"accountant {method!r} is wrong: the best known attack exceeds its bound",
                    expected=f"an epsilon of at least {reached:.6g}",
                    got=f"{epsilon:.6g}",
                    fix="choose another privacy.backend, and report this error",
                )
            reached = min(reached, epsilon)
        counted = self._counts.total(), tuple(caveats)
        return Report(epsilon, delta, method, reached, phases, *counted)

    def would_exceed(self, event: Event, budget: float, delta: float) -> bool:
        """True if the total would exceed a budget after one more such event."""
        _check(delta)
        _check_adjacencies([*self._counts, event])
        return self._bound(self._counts + Counter([event]), delta) > budget

    @property
    def releases(self) -> dict[Release, int]:
        """Number of times of each release, over all events so far."""
        return _releases_of(self._counts)

    def _bound(self, counts: Mapping[Event, int], delta: float) -> float:
        if any(isinstance(event, NonPrivate) and count for event, count in counts.items()):
            return math.inf
        return self.backend.epsilon(_releases_of(counts), delta)


def _releases_of(counts: Mapping[Event, int]) -> dict[Release, int]:
    """Number of times of each release, over all phases; events without noise are not included."""
    releases: Counter[Release] = Counter()
    for event, count in counts.items():
        for release, times in releases_in(event).items() if count else ():
            releases[release] += times * count
    return dict(releases)


def _check_adjacencies(events: Iterable[Event]) -> None:
    adjacencies = {
        event.adjacency for event in events if isinstance(event, NoisyRound | CorrelatedRounds)
    }
    if len(adjacencies) > 1:
        raise ExperimentError(
            "events under different adjacencies cannot be composed",
            got=" and ".join(sorted(adjacencies)),
            fix="use one adjacency for the whole run",
        )


def _check(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ExperimentError(
            "invalid delta",
            expected="a probability, 0 <= delta < 1",
            got=f"{delta}",
            fix="set a delta well below 1 / number of users, such as 1e-5",
        )


# Calibration: the smallest noise with which a number of rounds stays within a target epsilon.

_LEAST = 0.05
_MOST = 1e4
_TOLERANCE = 1e-4


def calibrate(
    epsilon: float,
    delta: float,
    releases: Callable[[float], Mapping[Release, int]],
    *,
    backend: str = DEFAULT_BACKEND,
) -> float:
    """Noise multiplier (noise scale / sensitivity) for a target.

    Args:
        epsilon: target for all rounds together, > 0.
        delta: in [0, 1).
        releases: cost of all rounds at a noise multiplier.
        backend: accountant of the target.

    Returns:
        A multiplier, at least 0.05, whose epsilon by the same accountant is at most the target; it
        exceeds the smallest such one by at most one part in 10,000.

    Raises:
        ExperimentError: no noise multiplier up to 10,000 is sufficient.
    """
    from scipy.optimize import brentq  # importing it is slow

    accountant = _backend_of(backend)

    @cache
    def spent(multiplier: float) -> float:
        return accountant.epsilon(releases(multiplier), delta)

    def excess(log_multiplier: float) -> float:
        """Logarithm of epsilon / target, which is nearly linear in that of the multiplier."""
        ratio = spent(math.exp(log_multiplier)) / epsilon
        return math.log(min(max(ratio, 1e-9), 1e9))

    if spent(_MOST) > epsilon:
        tightest = backend == "pld"
        orders = "Rényi orders up to 64 give at least about 0.1 at delta 1e-5"
        raise ExperimentError(
            "target epsilon is not reachable with this accountant",
            expected=f"a target reachable with a noise multiplier of at most {_MOST:,.0f}"
            + ("" if tightest else f": {orders}"),
            got=f"epsilon {epsilon:g} at delta {delta:g}",
            fix="raise epsilon or delta" + ("" if tightest else ", or use the backend pld"),
        )
    high = 1.0
    while spent(high) > epsilon:
        high *= 2
    while high > _LEAST and spent(high / 2) <= epsilon:
        high /= 2
    if high <= _LEAST:
        return _LEAST
    bracket = math.log(high / 2), math.log(high)
    root: Any = brentq(excess, *bracket, xtol=_TOLERANCE / 4)
    multiplier = math.exp(root)
    while spent(multiplier) > epsilon:
        multiplier *= 1 + _TOLERANCE / 3
    return max(multiplier, _LEAST)


# The privacy ledger of a run on disk: one JSON line per charge, written before a noisy release is
# used.
#
# A line is appended, flushed and synced to the disk, and only then may the round's parameters be
# stored or sent. If a run is killed between the two, the round was charged without being completed;
# when the run is resumed, the round is charged again. Charges are never refunded, because an
# adversary may have seen the release. A last line that was cut off by a crash was never synced, so
# nothing was released on it; it is dropped. Damage anywhere else is an error.


@dataclass(frozen=True)
class Charge:
    """One line of a ledger.

    Attributes:
        round_number: the round that was charged; the same number may occur more than once.
        event: what was released.
    """

    round_number: int
    event: Event


class Ledger:
    """Charges of one run. Only one process may write, which the run folder's lock ensures.

    Args:
        path: the file, created by the first charge.
        backend: accountant, as in `Accountant`.
        budget: largest epsilon of all charges together, > 0; None: no limit.
        delta: at which the budget holds, in [0, 1).

    Raises:
        RunError: the file is damaged, other than by a last line that was cut off.
    """

    def __init__(
        self,
        path: Path,
        backend: str = DEFAULT_BACKEND,
        *,
        budget: float | None = None,
        delta: float = 0.0,
    ) -> None:
        self.path = path
        self.budget = budget
        self.delta = delta
        self.accountant = Accountant(backend)
        self.charges: list[Charge] = []
        self._size = 0
        for number, line in enumerate(_lines(path), 1):
            try:
                self._count(_charge(line))
            except (ValueError, KeyError, TypeError, FedrecError) as error:
                raise RunError(
                    f"line {number} of {path} is damaged",
                    expected="a charge in JSON, as this version of fedrec writes it",
                    got=f"{line[:80]!r} ({error})",
                    fix="restore the file from a backup; without it the privacy spent is unknown",
                ) from None
            self._size += len(line)

    def charge(self, round_number: int, event: Event) -> None:
        """Write a charge to disk; the release may be used only after this returns.

        Raises:
            RunError: the total would exceed the budget, or the charge could not be written, so
                nothing may be released.
        """
        if self.would_exceed(event):
            raise RunError(
                f"the charge of round {round_number} exceeds the privacy budget",
                expected=f"a total epsilon of at most {self.budget:g} at delta {self.delta:g}",
                got=f"1 more of {to_record(event)}",
                fix="nothing was released; raise privacy.epsilon in a new run",
            )
        table = {"round": round_number, "event": to_record(event)}
        line = json.dumps(table, allow_nan=False)
        # rejects events that cannot be added, before anything is written
        self._count(Charge(round_number, event))
        written = line.encode() + b"\n"
        wanted = "a charge on disk before the release"
        append_durably(self.path, written, end=self._size, expected=wanted)
        self._size += len(written)

    def spent(self, delta: float) -> Report:
        """Total cost of all charges, see `Accountant.epsilon`."""
        return self.accountant.epsilon(delta)

    def would_exceed(self, event: Event) -> bool:
        """True if the total would exceed the budget after one more such event; False without a
        budget."""
        if self.budget is None:
            return False
        return self.accountant.would_exceed(event, self.budget, self.delta)

    def _count(self, charge: Charge) -> None:
        self.accountant.step(charge.event)
        self.charges.append(charge)


def _lines(path: Path) -> list[bytes]:
    """Complete lines of a file, with line ends."""
    if not path.exists():
        return []
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(
            f"cannot read {path}",
            expected="a ledger",
            got=error.strerror or str(error),
            fix="make the file readable, or restore it from a backup",
        ) from None
    if rest:
        logging.getLogger("fedrec").warning(
            "%s: line %d was cut off by a crash and is dropped", path, len(lines) + 1
        )
    return [line + b"\n" for line in lines]


def _charge(line: bytes) -> Charge:
    record = parse_json(line, MOST_JSON)
    number = record["round"]
    if type(number) is not int or number < 0 or len(record) != 2:
        raise ValueError(f"round {number!r}, keys {', '.join(record)}")
    return Charge(number, from_record(record["event"]))
