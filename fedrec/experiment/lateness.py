# SPDX-License-Identifier: Apache-2.0
"""Combinations of `[devices]`, `[closing]` and `[asynchronous]` with other settings."""

from __future__ import annotations

from dataclasses import dataclass

from fedrec.devices import DevicesConfig
from fedrec.experiment.tables import AsynchronousConfig, ClosingConfig
from fedrec.privacy.config import PrivacyConfig


@dataclass(frozen=True)
class Lateness:
    """The three tables of an experiment about late devices."""

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

    def check(self, sampler: str, *, secure: bool, privacy: PrivacyConfig | None) -> None:
        """Check that late answers can be left out or weighted, and that a guarantee covers who
        takes part.

        Args:
            sampler: its name.
            secure: whether there is secure aggregation.
            privacy: the `[privacy]` table.

        Raises:
            ValueError: says what cannot be combined.
        """
        with_buffer = self.asynchronous is not None
        timed = privacy is not None and self.devices is not None
        counts_rows = self.devices is not None and self.devices.examples is None
        rules = {
            "[privacy] with [devices] needs devices.examples: otherwise who takes part depends on"
            " how many rows a user has": timed and self.known_cohorts and counts_rows,
            "[devices] cannot be combined with privacy.mode = 'secure': the time that a round takes"
            " shows who took part, which has to be secret": (
                privacy is not None
                and timed
                and not self.known_cohorts
                and privacy.mode == "secure"
            ),
            "secure-aggregation cannot be combined with [closing], [asynchronous] or device"
            " availability: its masks only cancel if all nodes of a session answer": (
                secure and self.known_cohorts
            ),
            "[asynchronous] cannot be combined with [closing]: a round ends when its buffer is"
            " full, and no answer is too late": with_buffer and self.closing is not None,
            "[asynchronous] needs sampler.name = 'fixed-size': its buffer has as many answers as"
            " the sampler's cohort has clients": with_buffer and sampler != "fixed-size",
            "[asynchronous] cannot be combined with privacy.placement = 'distributed': the weight"
            " of stale answers would make the clients' shares of the noise smaller": (
                with_buffer and privacy is not None and privacy.placement == "distributed"
            ),
        }
        for message, broken in rules.items():
            if broken:
                raise ValueError(message)
