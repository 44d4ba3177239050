# SPDX-License-Identifier: Apache-2.0
"""The map between the data's ids and the numbers that clients and items have in a run folder.

ids/users.txt      line n (from 0): the data's id of user n, as a JSON text
ids/items.txt      the same of items
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.errors import RunError
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.text_files import parse_json

_AT_ONCE = 2**17


def write_ids(folder: Path, interactions: Interactions) -> None:
    """Write the ids of users and items below `folder`, once."""
    for name, ids in (("users", interactions.user_ids), ("items", interactions.item_ids)):
        file = folder / "ids" / f"{name}.txt"
        if not file.exists():
            write_atomically(file, id_lines(ids))


def id_lines(ids: np.ndarray) -> str:
    """The content of such a file, of ids `[n]`."""
    parts = np.split(ids, range(_AT_ONCE, len(ids), _AT_ONCE))  # texts take ten times their memory
    return "".join(f"{_lines(list(map(str, part.tolist())))}\n" for part in parts)


def _lines(texts: list[str]) -> str:
    return json.dumps(texts, ensure_ascii=False, separators=("\n", ":"))[1:-1]


def read_ids(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids of users and of items as texts, in the order of their numbers; None if the folder has
    none; `[n]` each.

    Raises:
        RunError: a file is damaged.
    """
    files = [folder / "ids" / f"{name}.txt" for name in ("users", "items")]
    if not all(file.exists() for file in files):
        return None
    users, items = (_read(file) for file in files)
    return users, items


def _read(file: Path) -> np.ndarray:
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        ids = parse_json(f"[{','.join(lines)}]", math.inf)  # as many as there are users
        return np.array(list(map(str, ids)), dtype=object)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} cannot be read",
            expected="one JSON text per line",
            got=str(error),
            fix="restore it from a backup, or start the run anew",
        ) from None
