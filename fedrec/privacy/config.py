# SPDX-License-Identifier: Apache-2.0
"""The `[privacy]` table of an experiment."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, BackendName
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.privacy.clipping import Clip
from fedrec.privacy.mechanisms.base import Mechanism, Placement, mechanism_of

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
    budget: float | None = Field(default=None, gt=0)
    """With `noise-multiplier`: largest epsilon; the run stops before a round that would exceed it.
    Default: no limit."""
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
        if self.epsilon is not None and self.budget is not None:
            raise ValueError("budget only with noise-multiplier; epsilon is a budget itself")
        if self.max_dropouts > 0 and self.placement != "distributed":
            raise ValueError("max-dropouts only with placement = 'distributed'")
        if self.placement == "local" and self.adjacency == "add-remove":
            raise ValueError(
                "adjacency = 'replace-one' with placement = 'local': the server sees who takes part"
            )
        return self

    @property
    def limit(self) -> float | None:
        """Largest epsilon after any round; None: no limit."""
        return self.budget if self.epsilon is None else self.epsilon

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

    def noise(self) -> Mechanism:
        """Import and return the mechanism.

        Raises:
            ExperimentError: it or one of its settings is unknown, or contradicts the other
                settings.
        """
        mechanism = mechanism_of(self.mechanism)
        name = mechanism.name
        rules = [
            ("delta", f"delta > 0 with {name} noise", self.delta == 0 and mechanism.order == 2),
            (
                "placement",
                f"{' or '.join(mechanism.placements)} with the mechanism {name!r}",
                self.placement not in mechanism.placements,
            ),
        ]
        for key, expected, broken in rules:
            if broken:
                raise ExperimentError(
                    f"wrong value for 'privacy.{key}'",
                    expected=expected,
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
