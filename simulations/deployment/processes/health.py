# SPDX-License-Identifier: Apache-2.0
"""Whether processes are healthy; also as a program, for the health checks of containers.

    python -m simulations.deployment.processes.health answers URL AUTHORITY
    python -m simulations.deployment.processes.health alive FOLDER

A container is checked every few seconds, so only the standard library is imported: the command line
of fedrec takes a second of a core to start.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from fedrec.runtime.text_files import read_json


def is_healthy(url: str, authority: Path) -> bool:
    """Whether a server answers, with a certificate of an authority."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(url, timeout=3, context=context) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def are_alive(logs: Path) -> bool:
    """Whether all processes of a supervisor run, by the list in its folder."""
    try:
        running = read_json(logs / "processes.json")["processes"].values()
        return bool(running) and all(Path(f"/proc/{entry['pid']}").exists() for entry in running)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def main(arguments: list[str]) -> int:
    """The exit status: 0 if all is healthy, 1 if not."""
    what, *given = arguments
    well = is_healthy(given[0], Path(given[1])) if what == "answers" else are_alive(Path(given[0]))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
