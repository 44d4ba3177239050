# SPDX-License-Identifier: Apache-2.0
"""The import of PyTorch in fedrec's own processes, without what they do not need."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

from fedrec.nn.meta_kernels import postpone_meta_kernels

_REGISTERING = ("torch.utils._debug_mode._mode", "torch._native.registry")


def shorten_torch_import() -> None:
    """Leave out the kernels of the meta device, see `fedrec.nn.meta_kernels`, and a search for a
    module, of this process's `import torch`, if that is still to come.

    PyTorch registers operations when it is imported and asks `inspect` for the modules that do it,
    which then compares the files of all modules: some ten thousand calls to the system, .06 to
    .24 s. Here the answers are among those that it has found before.
    """
    if "torch" in sys.modules:
        return
    postpone_meta_kernels()
    found = importlib.util.find_spec("torch")
    answers = getattr(inspect, "modulesbyfile", None)
    if found is None or found.origin is None or answers is None:
        return
    for name in _REGISTERING:
        file = Path(found.origin).parents[1].joinpath(*name.split(".")).with_suffix(".py")
        if file.exists():
            answers[str(file)] = name
