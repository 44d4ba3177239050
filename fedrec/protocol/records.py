# SPDX-License-Identifier: Apache-2.0
"""Arrays and settings of a message's records."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedrec.protocol.zero_copy import from_record, zero_copy_arrays

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"


def own_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Writable arrays of a message."""
    return from_record(_first(content))


def read_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Read-only arrays of a message, without a copy if memory is shared."""
    return zero_copy_arrays(_first(content))


def array_names(content: RecordDict) -> list[str]:
    """Names of the parameters that came with an order, in their order."""
    return list(_first(content))


def config_of(content: RecordDict) -> ConfigRecord:
    records = list(content.config_records.values())
    return records[0] if records else ConfigRecord()


def _first(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))
