# SPDX-License-Identifier: Apache-2.0
"""Texts with values filled in: `{key}` or `{key:format}`, with the formats of Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_KEY = re.compile(r"\{([\w-]+)(?::([^{}]*))?\}")
_WIDE = re.compile(r"\d{4}")  # a width or precision that no text needs


def filled(value: Any, known: Mapping[str, Any], used: set[str] | None = None) -> Any:
    """A value with all `{key}` in its texts replaced, whatever tables and lists they are in; a text
    that is `{key}` alone becomes the key's value.

    Args:
        value: of any kind.
        known: values by key; other keys stay as they are.
        used: receives the keys that occur.
    """
    if isinstance(value, Mapping):
        return {
            str(filled(key, known, used)): filled(one, known, used) for key, one in value.items()
        }
    if isinstance(value, list):
        return [filled(one, known, used) for one in value]
    if not isinstance(value, str):
        return value
    keys = {match[1] for match in _KEY.finditer(value)} & known.keys()
    if used is not None:
        used |= keys
    whole = _KEY.fullmatch(value)
    if whole and whole[1] in keys and whole[2] is None:
        return known[whole[1]]
    return _KEY.sub(lambda match: _text(match, known), value)


def _text(match: re.Match[str], known: Mapping[str, Any]) -> str:
    key, form = match.groups()
    if _WIDE.search(form or ""):
        raise ValueError(f"{match[0]} fills up memory")
    return format(known[key], form or "") if key in known else match[0]
