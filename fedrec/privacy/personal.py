# SPDX-License-Identifier: Apache-2.0
"""Local noise, added by each user's device: settings, budgets, costs and reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.privacy.accounting.rdp import gdp_epsilon, gdp_parameter
from fedrec.privacy.accounting.sampling import Adjacency
from fedrec.privacy.clipping import Clip
from fedrec.rng import stream
from fedrec.runtime.files import finite

if TYPE_CHECKING:
    import pandas as pd


# Budgets and costs of single users who each add their own Gaussian noise.
#
# A user's device sends one clipped vector of norm at most S with noise of standard deviation sigma
# on every coordinate, each time it takes part, and who takes part is known. Such releases compose
# exactly: n of them are equivalent to one Gaussian release with mu = sqrt(n) * sensitivity / sigma
# (`fedrec.privacy.accounting.rdp`). The sensitivity is S if neighbours differ by removing all of a
# user's data, and 2S if these are replaced by any other data.
#
# Where this differs from DP-VAE (Fang et al. 2022):
#
# - Its epsilon_k is that of a single release with sigma = sqrt(2 ln(1.25 / delta)) S / epsilon;
#   algorithm 3 does not depend on the number of rounds, and its theorem 4 quotes a bound for
#   subsampled training that this sigma does not meet. Here all releases count.
# - No amplification by sampling is claimed: the noise differs between users, so that the variance
#   of a sum reveals who was drawn.
# - Its neighbours differ in one sample of a user. Every example's gradient depends on all of the
#   user's samples through the encoder, so that a mean over J examples moves by up to 2S, not S / J;
#   here neighbours differ in all data of a user.


# The `priors` table of a step.


class PriorsConfig(Config):
    """Settings of user-level priors (equation 11)."""

    source: str = Field(default="onehot", pattern=r"^(onehot|glove:.+|table:.+)$")
    """Word vectors of the metadata: `onehot` (no similarity, no file), `glove:FILE` (a GloVe text
    file), `table:FILE` (a JSON object from words to lists of numbers of equal length)."""
    sha256: str | None = None
    """Required SHA-256 digest of the file; default: any."""
    features: tuple[str, ...] = ()
    """User features to use; default: all."""
    words: dict[str, str] = Field(default_factory=lambda: {"M": "male", "F": "female"})
    """Words to look up instead of labels."""
    noise: bool = True
    """Whether noise is added to the priors, as in the paper; otherwise they never leave the device,
    and the noise on gradients also protects the priors."""

    def files(self) -> Iterator[str]:
        """File of the word vectors, if any."""
        kind, _, name = self.source.partition(":")
        if kind != "onehot":
            yield name


# Settings of noise that each user adds on its own device, and the user's cost of an upload.
#
# For a step with such settings the server accounts for each user separately. Everything here
# depends on the settings and the user's id, never on data.

_PRIOR_SHARE = 0.2  # of a user's budget (squared sensitivity / noise), for noisy priors
PAPER_MODE = "no finite guarantee: the clip norm comes from private data"


class PersonalNoise(Config):
    """Settings of the noise that each user's device adds."""

    mode: Literal["sound", "paper"] = "sound"
    """`sound`: a fixed clip norm; `paper`: the paper's clip norm, from private data, without any
    guarantee."""
    clip_norm: float = Field(default=1.5, ge=1e-9)
    """Clip norm S in mode `sound` (paper: constant bounds of 1.5 and 2)."""
    epsilon: float = Field(default=1.0, gt=0)
    """The users' epsilon, or the largest one if they are drawn (paper: 1)."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The users' delta (paper: 1 / number of training rows)."""
    budgets: Literal["uniform", "equal"] = "uniform"
    """Whether each user's epsilon is drawn from (0, epsilon] (paper), or is the same for all."""
    budget_seed: int | None = Field(default=None, ge=0)
    """Seed of the drawn budgets and of noise on the priors; default: the experiment's seed."""
    participations: int | None = Field(default=None, ge=1)
    """Number of uploads that epsilon_k covers together, which a real node also counts over all runs
    and a simulation in its run; default: the paper's noise, for one upload, and no limit."""
    priors: PriorsConfig | None = None
    """Priors of the users' codes from their metadata (equation 11); default: standard normal."""
    noise: Literal["reproducible", "secure", "summed"] = "reproducible"
    """`reproducible`: from the seed, a simulation; `secure`: from the operating system's generator;
    `summed` (step `dpvae`): a simulation of very many users, in which the noise is drawn once for
    the sum of a node's users, of the same distribution, and no single upload exists."""

    @model_validator(mode="after")
    def _noise_fits(self) -> Self:
        if self.noise == "secure" and self._noisy_priors is not None:
            raise ValueError(
                "priors.noise = false with noise = 'secure': noise on priors is drawn once, and is"
                " not saved on the device; priors that stay on the device need none"
            )
        return self

    def seeded(self, seed: int) -> Self:
        """Return the settings with missing seeds derived from the experiment's seed."""
        return (
            self if self.budget_seed is not None else self.model_copy(update={"budget_seed": seed})
        )

    @property
    def own_seed(self) -> int:
        """Seed of budgets and priors; 0 outside an experiment."""
        return self.budget_seed or 0

    @property
    def _noisy_priors(self) -> PriorsConfig | None:
        """Priors, if noise is added to them; otherwise None, as they never leave the device."""
        return self.priors if self.priors is not None and self.priors.noise else None

    def requested(self, client: int) -> float:
        """Epsilon that a user requests at `delta`; if drawn, uniform in (0, epsilon] (DP-VAE,
        section 4.1.3), a function of seed and client."""
        drawn = 0.0
        if self.budgets == "uniform":
            drawn = float(stream(self.own_seed, "personal-budget", client).random())
        return self.epsilon * (1 - drawn)

    def of_largest_budget(self) -> Self:
        """Return the settings with the largest budget for every user."""
        return self.model_copy(update={"budgets": "equal"})

    def noise_multiplier(self, client: int) -> float:
        """Standard deviation / S of the noise on a user's gradient."""
        multiplier = self._multiplier(self.requested(client), self.participations)
        shared = self.participations is not None and self._noisy_priors is not None
        return multiplier / math.sqrt(1 - _PRIOR_SHARE) if shared else multiplier

    def paper_multiplier(self, client: int) -> float:
        """DP-VAE's sigma / S of one release: sqrt(2 ln(1.25 / delta)) / epsilon."""
        return self._multiplier(self.requested(client), None)

    def prior_multiplier(self, client: int) -> float:
        """Standard deviation / L2 sensitivity of the noise on a user's prior, mean and variance as
        one release."""
        if self._noisy_priors is None:
            return 0.0
        if self.participations is None:
            return self.paper_multiplier(client)
        parameter = gdp_parameter(self.requested(client), self.delta)
        return 1 / (parameter * math.sqrt(_PRIOR_SHARE))

    def cost(self, client: int, adjacency: Adjacency, uploads: int) -> float:
        """Squared parameter mu of all releases of a user together; infinite for any upload in mode
        `paper`. Priors are released with the first upload."""
        if not uploads:
            return 0.0
        if self.mode == "paper":
            return math.inf
        moved = Clip(1.0).sensitivity(adjacency)
        total = uploads * (moved / self.noise_multiplier(client)) ** 2
        if self._noisy_priors is not None:
            total += self.prior_multiplier(client) ** -2
        return total

    def weight(self, client: int) -> float:
        """Precision of a user's noise relative to that of the largest budget, in (0, 1]; public,
        like budgets."""
        releases = None if self.participations is None else 1
        least = self._multiplier(self.epsilon, releases)
        return (least / self._multiplier(self.requested(client), releases)) ** 2

    def _multiplier(self, epsilon: float, releases: int | None) -> float:
        """Smallest sigma / S with which that many releases stay within epsilon at `delta`, if all
        data of a user are replaced; None: DP-VAE's of one release."""
        if releases is None:
            return math.sqrt(2 * math.log(1.25 / self.delta)) / epsilon
        moved = Clip(1.0).sensitivity("replace-one")
        return math.sqrt(releases) * moved / gdp_parameter(epsilon, self.delta)


KINDS: tuple[Adjacency, ...] = ("add-remove", "replace-one")
_COLUMNS = ("uploads", "nominal", *KINDS)
_SHOWN = (0, 10, 50, 90, 100)  # percentiles


def epsilon_table(
    settings: PersonalNoise, clients: Sequence[int], asked: Sequence[int]
) -> pd.DataFrame:
    """One row per client.

    Args:
        settings: the users' noise.
        clients: their ids.
        asked: number of rounds in which each was drawn; a device uploads at most as often as
            planned.

    Returns:
        Indexed by client: `uploads`; `nominal`, the requested epsilon; `add-remove` and
        `replace-one`, the true epsilon of all releases at the configured delta if all data of the
        user may be removed or replaced; infinite with mode `paper` for all users with uploads,
        because the clip norm is computed from private data.
    """
    import pandas as pd

    limit = math.inf if settings.participations is None else settings.participations
    uploads = [int(min(number, limit)) for number in asked]
    frame = pd.DataFrame({"uploads": uploads}, index=pd.Index(list(clients), name="client"))
    frame["nominal"] = [settings.requested(client) for client in clients]
    for adjacency in KINDS:
        costs = [
            settings.cost(client, adjacency, number)
            for client, number in zip(clients, uploads, strict=True)
        ]
        frame[adjacency] = [gdp_epsilon(math.sqrt(cost), settings.delta) for cost in costs]
    return frame


def promises(settings: PersonalNoise) -> list[str]:
    """Notes to print before the run."""
    texts = []
    if settings.mode == "paper":
        texts.append(f"Mode 'paper': {PAPER_MODE}.")
    elif settings.participations is None:
        texts.append(
            "Noise is calibrated to one upload, as in the paper: each further upload costs more."
        )
    if settings.noise != "secure":
        texts.append(
            f"Users' noise is {settings.noise!r}: a simulation, not a release; noise can be"
            " computed from the seed."
        )
    return texts


def words(settings: PersonalNoise, table: pd.DataFrame) -> list[str]:
    """Describe the table in sentences."""
    uploads, nominal, removed, replaced = (table[name].to_numpy(dtype=float) for name in _COLUMNS)
    texts = promises(settings)
    texts.append(
        f"{len(table)} users requested epsilon {_spread(nominal)}; the epsilon of all their uploads"
        f" ({uploads.min():.0f} to {uploads.max():.0f} each) at delta {settings.delta:.3g} is"
        f" {_spread(replaced)} if a user's data are replaced, {_spread(removed)} if they are"
        " removed."
    )
    over = int((replaced > nominal * (1 + 1e-6)).sum())
    texts.append(
        f"{over} of {len(table)} users spent more than they requested. epsilons.csv has one row per"
        " user."
    )
    if settings.priors is not None:
        put = (
            "noise, which is counted"
            if settings.priors.noise
            else "no noise and stay on the device"
        )
        texts.append(f"Priors from users' metadata ({settings.priors.source}) have {put}.")
    return texts


def summary(table: pd.DataFrame) -> dict[str, dict[str, float | str]]:
    """Percentiles of each column as JSON values; infinity is the text "inf"."""
    return {
        column: {
            f"p{percent}": finite(value)
            for percent, value in zip(
                _SHOWN, _percentiles(table[column].to_numpy(dtype=float)), strict=True
            )
        }
        for column in _COLUMNS
    }


def _percentiles(values: np.ndarray) -> list[float]:
    # interpolation would make NaN out of two infinities
    return np.percentile(values, _SHOWN, method="nearest").tolist()


def _spread(values: np.ndarray) -> str:
    named = zip(("least", "10%", "median", "90%", "most"), _percentiles(values), strict=True)
    return ", ".join(f"{name} {value:.3g}" for name, value in named)
