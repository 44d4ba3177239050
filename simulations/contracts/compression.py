# SPDX-License-Identifier: Apache-2.0
"""The contract of a compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedrec.components.registry import COMPRESSION
from fedrec.compression.codec import Compression, Payload
from fedrec.protocol.updates import Change, SparseUpdate, dense_change, network_bytes
from fedrec.rng import stream
from simulations.contracts.base import RunContract, assert_equal, assert_that, same_bits, unchanged

_CLIP_NORM = 1e-3


class CompressionContract(RunContract):
    """Subclass it and set `component` to a `Compression`."""

    kind = COMPRESSION

    def test_what_is_decoded_has_the_shape_of_the_update(self) -> None:
        """Of arrays, vectors, numbers and rows of tables; zero stays zero."""
        for name, change in _changes().items():
            decoded = self._decoded(self._encoded(change), change.shape)
            whole = dense_change(decoded, np.zeros(change.shape))
            assert_equal(whole.shape, change.shape, f"shape of {name}")
            assert_that(bool(np.isfinite(whole).all()), f"{name} is not finite")
            nothing = self._decoded(self._encoded(_zero(change)), change.shape)
            quiet = not dense_change(nothing, np.zeros(change.shape)).any()
            assert_that(quiet, f"nothing of {name} becomes something")

    def test_rows_that_did_not_change_stay(self) -> None:
        """Of a table, only rows of the update change."""
        change = _changes()["rows"]
        whole = dense_change(self._decoded(self._encoded(change), change.shape), np.zeros(0))
        others = np.delete(whole, change.rows, axis=0)
        assert_that(not others.any(), "other rows change")

    def test_it_sends_less_than_the_update(self) -> None:
        """No more bytes than rows and numbers as they are."""
        change = _changes()["rows"]
        plain = change.rows.nbytes + change.values.astype(np.float32).nbytes
        sent = network_bytes(self._encoded(change))
        assert_that(0 < sent <= plain, f"{sent} bytes, where the update has {plain}")

    def test_it_is_a_function_of_its_streams(self) -> None:
        """The same streams give the same bits, and the update is not changed in place."""
        for change in _changes().values():
            values = change.values if isinstance(change, SparseUpdate) else change
            with unchanged({"update": values}):
                first = self._encoded(change)
            assert_that(same_bits(first, self._encoded(change)), "one stream gives two messages")

    def test_a_run_counts_what_is_sent(self, tmp_path: Path) -> None:
        """Each round states its bytes, less than whole parameters, and so does the result."""
        result = self.plain(tmp_path)
        whole = sum(value.nbytes for value in result.parameters.values())
        sent = result.rounds["bytes-up"] / result.rounds["num-clients"]
        assert_that(bool((sent > 0).all()), "nothing is counted")
        assert_that(bool((sent < whole).all()), f"{sent.max():.0f} bytes a client, of {whole}")

    def test_the_clip_bounds_what_is_decoded(self, tmp_path: Path) -> None:
        """Without noise, a round of n clients moves the mean by no more than the clip norm."""
        private = f"privacy={{clip-norm={_CLIP_NORM}, noise-multiplier=0.0, delta=1e-5}}"
        rate = "strategy={name='reptile', server-lr=1.0}"
        runs = [
            self.run(tmp_path / str(rounds), private, rate, f"rounds={rounds}").parameters
            for rounds in (1, 2)
        ]
        apart = [runs[1][name] - runs[0][name] for name in runs[0]]
        norm = float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in apart)))
        assert_that(norm <= _CLIP_NORM * 1.01, f"a round moves by {norm:.4g}, above {_CLIP_NORM}")

    def _made(self) -> Compression:
        return self.cls(self.config())

    def _encoded(self, change: Change) -> Payload:
        return self._made().encode(change, stream(0, "own"))

    def _decoded(self, payload: Payload, shape: tuple[int, ...]) -> Change:
        return self._made().decode(payload, shape)


def _changes() -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows = np.array([1, 4, 5, 17, 36, 299])
    return {
        "array": random.normal(size=(12, 8)).astype(np.float32),
        "vector": random.normal(size=9).astype(np.float32),
        "number": np.float32(0.5) * np.ones((), dtype=np.float32),
        "rows": SparseUpdate((300, 16), rows, random.normal(size=(6, 16)).astype(np.float32)),
        "no rows": SparseUpdate((300, 16), rows[:0], np.zeros((0, 16), dtype=np.float32)),
        "numbers": SparseUpdate((300,), rows, random.normal(size=6).astype(np.float32)),
    }


def _zero(change: Change) -> Change:
    if isinstance(change, SparseUpdate):
        return SparseUpdate(change.shape, change.rows, np.zeros_like(change.values))
    return np.zeros_like(change)
