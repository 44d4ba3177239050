# SPDX-License-Identifier: Apache-2.0
"""Code that is compiled ahead of training, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def assert_compiled_once(cache, command, functions=1):
    """A process compiles so many functions, with an empty cache; another trains and compiles none.

    The command is Python that does what its argument says, 'before' or 'after', and prints how many
    functions it compiled.
    """
    environment = os.environ | {"FEDREC_CACHE": str(cache)}
    for when, compiled in (("before", functions), ("after", 0)):
        found = subprocess.run(
            [sys.executable, "-c", command, when],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split()[-1] == str(compiled)
