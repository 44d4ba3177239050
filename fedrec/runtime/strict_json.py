# SPDX-License-Identifier: Apache-2.0
"""Values for JSON, which has no infinity and no NaN."""

from __future__ import annotations

from typing import Any

import numpy as np


def finite(value: Any) -> Any:
    """A JSON value with infinite numbers as text, such as "inf", which `float` reads in most
    languages, and None for NaN: what no user has a value of."""
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    if not isinstance(value, (float, np.floating)) or np.isfinite(value):
        return value
    return None if np.isnan(value) else str(float(value))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number as `finite` writes it."""
    return type(value) in (int, float, type(None)) or value in ("inf", "-inf")


def number(value: float | str | None) -> float:
    """A number that `finite` wrote: NaN for None, and infinity for its text.

    Raises:
        ValueError: it is a text that is no number.
        TypeError: it is no number, text or None.
    """
    return float("nan") if value is None else float(value)
