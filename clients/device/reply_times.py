# SPDX-License-Identifier: Apache-2.0
"""When the reply to a message leaves a node: the time of the work tells how many rows its clients
have."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_multiples_of(interval: float) -> Iterator[None]:
    """End at a multiple of so many seconds after the begin, also with an error; 0 waits for
    nothing. Who sees when a reply leaves learns which multiple it was, and no more."""
    began = time.monotonic()
    try:
        yield
    finally:
        if interval:
            time.sleep((began - time.monotonic()) % interval)
