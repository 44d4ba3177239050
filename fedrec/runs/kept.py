# SPDX-License-Identifier: Apache-2.0
"""What a run computes from its data and settings alone, kept for later runs.

Files lie in `$FEDREC_CACHE/baselines` (default `~/.cache/fedrec/baselines`), each under a digest of
all that it depends on: `surroundings`, data, settings and seed. So a run has the same bytes with
what is kept and without it. Only the most recently used files stay, readable by this user alone,
because they tell of single users of the data; they may be deleted at any time.
`FEDREC_CACHE_BASELINES=no` switches this off.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_info

import fedrec
from fedrec.errors import RunError
from fedrec.runs.environment import environment
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.compiled_code import cache_folder
from fedrec.runtime.content_digest import content_digest, source_digest

LARGEST = 2**29
"""Bytes of the files that are kept."""


def kept_folder() -> Path | None:
    """The folder of what is kept; None if that is switched off."""
    if os.environ.get("FEDREC_CACHE_BASELINES", "").lower() in ("no", "off", "0"):
        return None
    return cache_folder().parent / "baselines"


def kept_files(folder: Path) -> list[Path]:
    """What is kept in a folder; nothing where there is none."""
    return [*folder.glob("*.json"), *folder.glob("*.npz")]


def surroundings() -> str:
    """Digest of what all numbers depend on: the code of fedrec, and the libraries with their
    threads and the processor's instructions."""
    libraries = [
        [found.get(key) for key in ("internal_api", "version", "architecture", "num_threads")]
        for found in threadpool_info()
    ]
    machine = {key: value for key, value in environment().items() if key != "commit"}
    return content_digest(
        source_digest(Path(fedrec.__file__).parent),
        machine,
        sorted(map(repr, libraries)),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )


def read_kept(file: Path) -> bytes | None:
    """The content of a file; None if nothing is kept."""
    try:
        found = file.read_bytes()
        file.touch()  # the most recently used are kept
    except OSError:
        return None
    return found


def keep(file: Path, content: bytes | str) -> None:
    """Keep a file, and delete what was used least recently beyond `LARGEST`. A folder that cannot
    be written keeps nothing."""
    with suppress(RunError, OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, content, durable=False)
        total = 0
        for one in sorted(
            kept_files(file.parent), key=lambda one: one.stat().st_mtime, reverse=True
        ):
            total += one.stat().st_size
            if total > LARGEST:
                one.unlink()


def kept_arrays(
    compute: Callable[[], Mapping[str, np.ndarray]], *depends: object
) -> dict[str, np.ndarray]:
    """Arrays that an earlier run computed from the same values, else those computed now.

    Args:
        compute: computes them, from these values, the code of fedrec and nothing else.
        depends: the values, as for `content_digest`.

    Raises:
        TypeError: a value has no digest.
    """
    folder = kept_folder()
    if folder is None:
        return dict(compute())
    file = folder / f"{content_digest(surroundings(), *depends)[:32]}.npz"
    found = _arrays(read_kept(file))
    if found is None:
        found = dict(compute())
        packed = io.BytesIO()
        np.savez(packed, **found)  # pyright: ignore[reportArgumentType]
        keep(file, packed.getvalue())
    return found


def _arrays(content: bytes | None) -> dict[str, np.ndarray] | None:
    """The arrays of a file; None if it is damaged."""
    if content is None:
        return None
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
