# SPDX-License-Identifier: Apache-2.0
"""What of an environment a node needs: the installed packages that its process imports, and their
sizes.

    python benchmarks/node_packages.py
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions

from simulations.deployment import entry

_SHOWN = 20


def main() -> None:
    """Print the largest packages, whether a node imports them, and the sums."""
    entry.import_everything()
    imported = {name.partition(".")[0] for name in sys.modules}
    found = sorted(
        ((_size(one), _used(one, imported), one.metadata["Name"]) for one in distributions()),
        reverse=True,
    )
    for size, used, name in found[:_SHOWN]:
        print(f"{size / 1e6:8.1f} MB  {'imported' if used else '        '}  {name}")
    own = [size for size, used, _ in found if used]
    whole = sum(size for size, *_ in found)
    print(
        f"{whole / 1e6:,.0f} MB in {len(found)} packages; a node imports {sum(own) / 1e6:,.0f} MB"
        f" in {len(own)}"
    )


def _size(package: Distribution) -> int:
    paths = (package.locate_file(file) for file in package.files or [])
    return sum(path.stat().st_size for path in paths if path.is_file())  # type: ignore[attr-defined]


def _used(package: Distribution, imported: set[str]) -> bool:
    tops = (str(file).partition("/")[0].partition(".")[0] for file in package.files or [])
    return not imported.isdisjoint(tops)


if __name__ == "__main__":
    main()
