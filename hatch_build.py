# SPDX-License-Identifier: Apache-2.0
"""Compiles `fedrec/cohort/compiled.c` when fedrec is installed, if there is a C compiler; fedrec works without."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC"]


class CompileHook(BuildHookInterface):
    """Puts the library beside its source, for editable installations, and into wheels, then those of one platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface.initialize`."""
        if self.target_name != "wheel":
            return
        library = compiled(Path(self.root) / "fedrec" / "cohort" / "compiled.c")
        if library is not None:
            build_data["artifacts"].append(str(library.relative_to(self.root)))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiled(source: Path) -> Path | None:
    """Compile a source; earlier libraries of it go.

    Returns:
        The library; None without a compiler, or if it could not do it. The name tells which versions of the source and
        of `compiled.py`, which calls it, it belongs to: that looks for this name and so never meets another's library.
    """
    if not sys.platform.startswith("linux"):
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    digest = hashlib.sha256(source.read_bytes() + source.with_name("compiled.py").read_bytes()).hexdigest()
    library = source.with_name(f"{source.stem}-{digest[:16]}.so")
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [*compiler.split(), *FLAGS, "-o", str(unfinished), str(source), "-lm"], check=True, capture_output=True
        )
        unfinished.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        unfinished.unlink(missing_ok=True)
        print(f"{source.name} was not compiled, fedrec will be slower: {error}", file=sys.stderr)
        return None
    for earlier in source.parent.glob(f"{source.stem}-*.so"):
        if earlier != library:
            earlier.unlink(missing_ok=True)
    return library
