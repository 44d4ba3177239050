# SPDX-License-Identifier: Apache-2.0
"""Values for JSON, which has no infinity and no NaN."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """A JSON value with its numbers that are not finite as text, such as "inf", which `float` reads
    in most languages."""
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
