# SPDX-License-Identifier: Apache-2.0
"""The noise of earlier rounds that later rounds take back, in files of their own: whoever reads it
can remove noise from a model, so it must not be in a checkpoint, which is one.

A file belongs to the checkpoint with the same number of charges in the ledger. Noise is charged
before it is drawn, so that no other noise has that number, and a round that is repeated after an
interruption starts with the noise that it had. The files are in `private/` of the run folder,
readable by their owner only; a finished run keeps none (`fedrec.runs.folder`).
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedrec.errors import RunError
from fedrec.runs.folder import RunFolder
from fedrec.runtime.atomic_files import open_atomically

_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)
"""What reading a damaged file may raise."""


class NoiseFiles:
    """The noise of a run's checkpoints.

    Args:
        run: the run folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def file(self, charges: int) -> Path:
        """The file of the checkpoint with so many charges in the ledger."""
        return self.run.path / "private" / f"noise-{charges:09d}.npz"

    def save(self, charges: int, noise: Mapping[str, np.ndarray]) -> None:
        """Write the noise of a checkpoint, before the checkpoint itself, and drop that of
        checkpoints which are no longer kept.

        Args:
            charges: number of charges in the ledger at this checkpoint.
            noise: named arrays.

        Raises:
            RunError: it cannot be written; the earlier files are intact.
        """
        file = self.file(charges)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.parent.chmod(0o700)
        with open_atomically(file, mode=0o600) as opened:
            np.savez(opened, **noise)  # pyright: ignore[reportArgumentType]
        # one more than there are checkpoints, as the new one is not yet written
        files = sorted(file.parent.glob("noise-*.npz"))
        for old in files[: -self.run.experiment.checkpoint.keep - 1]:
            old.unlink()

    def read(self, charges: int) -> dict[str, np.ndarray] | None:
        """The noise of the checkpoint with so many charges in the ledger; None if there is no file.

        Raises:
            RunError: the file is damaged.
        """
        file = self.file(charges)
        try:
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
                return dict(archive)
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            raise RunError(
                f"{file} is damaged",
                expected="the noise of earlier rounds, as fedrec wrote it",
                got=f"{type(error).__name__}: {error}",
                fix="restore it from a backup, or delete it: later noise is then drawn anew, and"
                " all rounds of its phase are charged once more",
            ) from None
