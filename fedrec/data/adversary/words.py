# SPDX-License-Identifier: Apache-2.0
"""What is reported of an adversary with the results of a run."""

from __future__ import annotations

from fedrec.data.adversary.known import Known
from fedrec.data.interactions import Interactions

_SHOWN = 5  # targets


def adversary_words(attack: str, known: Known, interactions: Interactions) -> str:
    """The number of malicious clients, the attack, by its name, and its targets."""
    ids = interactions.item_ids[known.targets[:_SHOWN]].astype(str)
    names = ", ".join(ids.tolist()) + (" and others" if len(known.targets) > _SHOWN else "")
    count = len(known.malicious)
    said = (
        f"{count} of {known.honest + count} training clients are malicious (attack {attack});"
        " all metrics are of honest users."
        if count
        else "no client is malicious, so exposure is that without an attack."
    )
    return f"Adversary: {said} Targets: {names}."
