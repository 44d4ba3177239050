# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all state between two rounds in one file, written whole, checked when read.

A checkpoint is a numpy archive without pickled objects: the global parameters, the strategy's
arrays, and one JSON text. The archive's checksums detect a damaged file; then the previous
checkpoint is used, with a warning.

Writing a large catalogue can take as long as training a round, so it happens while the next round's
clients train.
"""

from __future__ import annotations

import io
import json
import logging
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedrec.errors import RunError
from fedrec.prefixes import add_prefix, strip_prefix
from fedrec.runs.folder import RunFolder
from fedrec.runtime.atomic_files import open_atomically

log = logging.getLogger("fedrec")


@dataclass(frozen=True, eq=False)
class State:
    """Everything between two rounds.

    Attributes:
        round: the last complete round; 0 before the first.
        parameters: the global parameters.
        strategy: arrays and numbers of the strategy's state.
        rounds: one row of metrics per round so far.
        timings: one row of seconds per round so far.
    """

    round: int
    parameters: dict[str, np.ndarray]
    strategy: dict[str, np.ndarray] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of the checkpoints.
        digest: digest of the experiment; a checkpoint of another one is refused.
        keep: how many remain.
        earlier: digests of the same experiment before it was amended.
    """

    def __init__(
        self, folder: Path, digest: str, *, keep: int, earlier: Iterable[str] = ()
    ) -> None:
        self.folder = folder
        self.digest = digest
        self.keep = keep
        self._known = (digest, *earlier)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    @classmethod
    def of(cls, run: RunFolder) -> Checkpoints:
        """Those of a run folder, also from before its experiment was amended."""
        experiment = run.experiment
        keep = experiment.checkpoint.keep
        earlier = run.digests
        return cls(run.checkpoints, experiment.digest(), keep=keep, earlier=earlier)

    def begin(self, state: State) -> None:
        """Start to `save` a state in the background; its arrays must stay as they are until
        `finish`.

        Raises:
            RunError: the previous one could not be written.
        """
        self.finish()
        self._writing = self._writer.submit(self.save, state)

    def finish(self) -> None:
        """Wait until the state passed to `begin` is written.

        Raises:
            RunError: it could not be written.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def save(self, state: State) -> None:
        """Write the state of a round and drop the oldest checkpoints beyond `keep`.

        Raises:
            RunError: it cannot be written; the earlier ones are intact.
        """
        with open_atomically(self._file(state.round)) as file:
            _write(file, _arrays(state, self.digest))
        for old in self._files()[: -self.keep]:
            old.unlink()

    def latest(self) -> State | None:
        """The newest state that can be read; None when there is no checkpoint at all.

        Raises:
            RunError: there are checkpoints, and none can be read.
        """
        files = self._files()
        for file in reversed(files):
            try:
                return _decode(_content(file), self._known)
            except _Damaged as damage:
                log.warning(
                    "checkpoint %s is damaged (%s); falling back to the one before",
                    file.name,
                    damage,
                )
        if files:
            raise RunError(
                f"no checkpoint in {self.folder} can be read",
                expected="at least one whole checkpoint",
                got=f"{len(files)} damaged files",
                fix="start a new run with `fedrec run`",
            )
        return None

    def _file(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number:06d}.npz"

    def _files(self) -> list[Path]:
        return sorted(
            file
            for file in self.folder.glob("round-*.npz")
            if re.fullmatch(r"round-\d+\.npz", file.name)
        )


def _write(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Like `numpy.savez`, which copies a table in pieces of 16 MiB, but without copies."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            flat = np.asarray(array, order="C")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_2_0(
                    member, np.lib.format.header_data_from_array_1_0(flat)
                )  # type: ignore[arg-type]
                member.write(flat.reshape(-1).view(np.uint8).data)


class _Damaged(Exception):
    """A checkpoint cannot be read."""


def _arrays(state: State, digest: str) -> dict[str, np.ndarray]:
    about = {
        "round": state.round,
        "rounds": state.rounds,
        "timings": state.timings,
        "digest": digest,
    }
    arrays = add_prefix({"parameters/": state.parameters, "strategy/": state.strategy})
    about["arrays"] = sorted(arrays)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    return arrays


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _Damaged(error.strerror or str(error)) from None


def _decode(content: bytes, digests: Sequence[str]) -> State:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        _refuse_other_shape(about, arrays)
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        KeyError,
        EOFError,
        OSError,
        RuntimeError,
        TypeError,
    ) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from None
    if about["digest"] not in digests:
        raise RunError(
            "the checkpoint belongs to another experiment",
            expected=f"digest {digests[0]}",
            got=f"digest {about['digest']}",
            fix="start a new run with `fedrec run`",
        )
    return State(
        about["round"],
        strip_prefix("parameters/", arrays),
        strip_prefix("strategy/", arrays),
        about["rounds"],
        about["timings"],
    )


def _refuse_other_shape(about: object, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse metadata that do not describe a state, and arrays that differ from its list.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(about, dict) or not isinstance(about.get("digest"), str):
        raise ValueError("no digest of the experiment")
    if type(about.get("round")) is not int or about["round"] < 0:
        raise ValueError("no number of a round")
    for name in ("rounds", "timings"):
        rows = about.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"no rows of {name}")
    if about.get("arrays", sorted(arrays)) != sorted(arrays):  # earlier versions wrote no list
        raise ValueError("an array is missing, or was added")
