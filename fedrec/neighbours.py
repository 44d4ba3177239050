# SPDX-License-Identifier: Apache-2.0
"""The packages beside fedrec, whose names are common words: a file or folder of the same name
beside a script or notebook would be imported in their place."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEIGHBOURS = ("clients", "server", "strategies", "simulations")


def require_own_packages() -> None:
    """Check that the neighbours are those that belong to fedrec; nothing is imported.

    Raises:
        ImportError: another file or folder hides one.
    """
    for name in NEIGHBOURS:
        found = _file_of(name)
        if found is not None and not found.is_relative_to(ROOT):
            shown = found.parent if found.name == "__init__.py" else found
            raise ImportError(
                f"{shown} hides a package of fedrec\n"
                f"  expected: the package {name!r} in {ROOT}\n"
                f"  got: another {name!r}, which Python finds first\n"
                "  fix: python -P script.py, or PYTHONSAFEPATH=1 in the environment (for notebooks,"
                f" too), so that Python does not search {shown.parent} first; if PYTHONPATH has"
                " that folder, take it out",
                name=name,
                path=str(found),
            )


def _file_of(name: str) -> Path | None:
    """The file that `import name` would execute, or has executed; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module made by hand
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None
