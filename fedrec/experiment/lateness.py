# SPDX-License-Identifier: Apache-2.0
"""Which settings the tables `[devices]`, `[closing]` and `[asynchronous]` fit."""

from __future__ import annotations

from dataclasses import dataclass

from fedrec.devices import DevicesConfig
from fedrec.experiment.tables import AsynchronousConfig, ClosingConfig
from fedrec.privacy.config import PrivacyConfig


@dataclass(frozen=True)
class Lateness:
    """What an experiment says of late devices: its three tables."""

    devices: DevicesConfig | None
    closing: ClosingConfig | None
    asynchronous: AsynchronousConfig | None

    @property
    def known_cohorts(self) -> bool:
        """Whether the speed or availability of devices decides who takes part in a round, so that
        nothing is gained by sampling."""
        away = self.devices is not None and self.devices.sometimes_away
        return away or self.leaves_late

    @property
    def leaves_late(self) -> bool:
        """Whether rounds end without the clients that are late, which are no failures."""
        return self.closing is not None or self.asynchronous is not None

    def refuse_others(self, sampler: str, *, secure: bool, privacy: PrivacyConfig | None) -> None:
        """Refuse settings with which late answers cannot be left out or weighted, or of which a
        guarantee does not cover who takes part.

        Args:
            sampler: its name.
            secure: whether there is secure aggregation.
            privacy: the `[privacy]` table.

        Raises:
            ValueError: says what is expected.
        """
        self._refuse_times(privacy)
        if secure and self.known_cohorts:
            raise ValueError(
                "[closing], [asynchronous] and the availability of devices without"
                " secure-aggregation: masks cancel in the sum of the nodes that began a session,"
                " which waits for them up to engine.timeout and goes on without those that are late"
            )
        if self.asynchronous is not None:
            self._refuse_asynchronous(sampler, privacy)

    def _refuse_times(self, privacy: PrivacyConfig | None) -> None:
        if privacy is None or self.devices is None:
            return
        if self.known_cohorts and self.devices.examples is None:
            raise ValueError(
                "devices.examples with [privacy], so that who takes part does not depend on how"
                " many rows a user has"
            )
        if not self.known_cohorts and privacy.mode == "secure":
            raise ValueError(
                "[devices] without privacy.mode = 'secure': the time that a round takes shows who"
                " took part, which has to be secret"
            )

    def _refuse_asynchronous(self, sampler: str, privacy: PrivacyConfig | None) -> None:
        if self.closing is not None:
            raise ValueError(
                "[asynchronous] without [closing]: a round ends when its buffer is full, and no"
                " answer is too late"
            )
        if sampler != "fixed-size":
            raise ValueError(
                "sampler.name = 'fixed-size' with [asynchronous], whose buffer has as many answers"
                " as the sampler's cohort has clients"
            )
        if privacy is not None and privacy.placement == "distributed":
            raise ValueError(
                "[asynchronous] without privacy.placement = 'distributed': the weight of stale"
                " answers would make the clients' shares of the noise smaller"
            )
