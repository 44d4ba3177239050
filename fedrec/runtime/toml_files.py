# SPDX-License-Identifier: Apache-2.0
"""TOML files of users."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedrec.errors import FedrecError


def read_toml(file: Path, error: type[FedrecError]) -> dict[str, Any]:
    """The table in a TOML file.

    Args:
        file: the file.
        error: class of the errors.

    Raises:
        FedrecError: of class `error`: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise error(
            f"{file} cannot be read",
            expected="a TOML file",
            got=e.strerror or str(e),
            fix="check its name and permissions",
        ) from None
    except (ValueError, RecursionError) as e:  # those of TOML and text are ValueErrors
        raise error(
            f"{file} cannot be read, as it is not TOML",
            expected="TOML text",
            got=str(e),
            fix="correct it",
        ) from None
