# SPDX-License-Identifier: Apache-2.0
"""Metrics that had other names in run folders of format 1, and the texts of these folders.

A run folder keeps the names of its format to its end, also while a later version resumes it, so
that all of its files have the same ones: texts are translated where they are read and written.
Format 2 renamed two metrics, because `ndcg` is what others call the NDCG of a whole list.

    format 1       since format 2
    ndcg@k         discounted-hits@k
    ndcg-list@k    ndcg@k
"""

from __future__ import annotations

import re
from collections.abc import Mapping

RENAMED = 2
"""The format that has the present names."""
_PRESENT = {"ndcg": "discounted-hits", "ndcg-list": "ndcg"}
_WRITTEN = {present: written for written, present in _PRESENT.items()}


def present_names(text: str, version: int) -> str:
    """A text of a run folder, such as a table, JSON or the experiment, with the present names of
    metrics.

    Args:
        text: as it is in the folder.
        version: format of the folder.
    """
    return text if version >= RENAMED else _renamed(text, _PRESENT)


def written_names(text: str, version: int) -> str:
    """The inverse of `present_names`: a text as it is written into a folder of this format."""
    return text if version >= RENAMED else _renamed(text, _WRITTEN)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with metrics renamed: before a list length, as in `validation-ndcg@5`, and where a
    whole quoted text is one, as in `metrics = ["ndcg"]`. Other metrics, such as `target-ndcg@5`,
    stay."""
    known = "|".join(sorted(names, key=len, reverse=True))
    pattern = rf'(?<![\w-])(validation-)?({known})(?=@)|(?<=")({known})(?=")'
    return re.sub(pattern, lambda found: (found[1] or "") + names[str(found[2] or found[3])], text)
