# SPDX-License-Identifier: Apache-2.0
"""Messages of secure aggregation."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedrec.protocol.messages import ARRAYS, CONFIG, config_of, read_arrays
from fedrec.protocol.secure import KEY_BYTES, Words
from fedrec.protocol.serialization import to_record

_MASKED = "masked"
_MOST_PROOF = 8192  # bytes

AnyWords = TypeVar("AnyWords", bound=Words)


def pack_masked(masked: np.ndarray) -> RecordDict:
    """The answer to a training message under secure aggregation: only the masked sum, `uint64
    [length]`."""
    return RecordDict({ARRAYS: to_record({_MASKED: masked})})


def unpack_masked(content: RecordDict, length: int) -> np.ndarray:
    """A node's masked sum, `uint64 [length]`, which is untrusted input.

    Raises:
        ValueError: it has another type or length.
    """
    masked = read_arrays(content)[_MASKED]
    if masked.dtype != np.uint64 or masked.shape != (length,):
        raise ValueError(f"expected uint64 [{length}], got {masked.dtype} {list(masked.shape)}")
    return masked


def pack_words(words: Words) -> RecordDict:
    """Pack an order or an answer of secure aggregation."""
    return RecordDict({CONFIG: ConfigRecord(words.fields())})  # type: ignore[arg-type]


def unpack_words(kind: type[AnyWords], content: RecordDict) -> AnyWords:
    """Unpack the result of `pack_words`, which is untrusted input.

    Raises:
        ValueError: it is malformed.
    """
    return kind.read(config_of(content))


def pack_channel(key: bytes, proof: bytes = b"") -> RecordDict:
    """A node's public channel key, and a proof that it is that node's."""
    return RecordDict({CONFIG: ConfigRecord({"channel": key, "proof": proof})})


def unpack_channel(content: RecordDict) -> tuple[bytes, bytes]:
    """A node's public channel key and its proof, which is untrusted input.

    Raises:
        ValueError: it is malformed.
    """
    config = config_of(content)
    key = config.get("channel")
    proof = config.get("proof")
    if (
        not isinstance(key, bytes)
        or len(key) != KEY_BYTES
        or not isinstance(proof, bytes)
        or len(proof) > _MOST_PROOF
    ):
        raise ValueError(
            f"expected a key of {KEY_BYTES} bytes, and a proof of at most {_MOST_PROOF}"
        )
    return key, proof
