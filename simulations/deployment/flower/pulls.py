# SPDX-License-Identifier: Apache-2.0
"""Shorter waits for pieces of a message that have not arrived yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

FIRST_PULL_WAIT, LONGEST_PULL_WAIT = 0.05, 1.0
"""Seconds before a missing piece of an announced message is requested again (Flower: 1 and 10)."""


def quick(pull: Callable[..., Any], **settings: float) -> Callable[..., Any]:
    """One of Flower's functions that pull the pieces of a message, with shorter waits."""
    return partial(pull, initial_backoff=FIRST_PULL_WAIT, backoff_cap=LONGEST_PULL_WAIT, **settings)
