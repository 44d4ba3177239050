# SPDX-License-Identifier: Apache-2.0
"""PyTorch without the kernels of its meta device, until something needs them.

`import torch` ends with `torch._meta_registrations`, which imports PyTorch's decompositions and
reference implementations: a quarter of its processor time, and 17 MiB of each process. They are for
PyTorch's compiler, its export and fake tensors, which import a module that is watched here, and for
some operations on the meta device. These alone do not import them: PyTorch refuses an operation
without a kernel, until `import torch._decomp`. Other versions than those tested are imported whole.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_KERNELS = "torch._meta_registrations"
_NEEDED = ("torch._decomp", "torch._prims", "torch._refs")
_TESTED = {(2, 13)}  # versions of PyTorch that have nothing else which needs them
# each of them would begin a circle of imports in another place
_WATCHED = (*_NEEDED, "torch._prims_common.wrappers", "torch.utils._content_store")


def postpone_meta_kernels() -> None:
    """Leave them out of this process's `import torch`, if that is still to come, and import them
    with what needs them. For processes of fedrec's own: others may expect all of PyTorch."""
    if "torch" not in sys.modules and not any(isinstance(f, _MetaKernels) for f in sys.meta_path):
        sys.meta_path.insert(0, _MetaKernels())


class _MetaKernels(MetaPathFinder, Loader):
    """Puts another module in place of the kernels, and imports them before what needs them.

    PyTorch's modules import each other in circles, so that what comes first must be the kernels.
    """

    def __init__(self) -> None:
        self._postponed = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the other module, or of one that was imported with the kernels."""
        if fullname == _KERNELS and _can_wait():
            return ModuleSpec(fullname, self)
        if not self._postponed or fullname not in _WATCHED:
            return None
        self.load()
        return _Imported.spec_of(fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The other module."""
        return _LaterModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do for PyTorch what else the import of the kernels does: set attributes, and complete the
        class of its random generators."""
        torch: Any = sys.modules["torch"]
        for name in _NEEDED:
            setattr(torch, name.rpartition(".")[2], _LaterModule(name, self))
        if hasattr(torch._C, "_set_generator_metaclass"):
            base = importlib.import_module("torch._opaque_base")
            torch._C._set_generator_metaclass(base.OpaqueBaseMeta)
        self._postponed = True

    def load(self) -> None:
        """Import the kernels, and what they need."""
        if self._postponed:
            self._postponed = False
            sys.meta_path.remove(self)
            del sys.modules[_KERNELS]
        importlib.import_module(_KERNELS)


class _LaterModule(ModuleType):
    """Stands for a module until somebody asks for what is in it."""

    def __init__(self, name: str, finder: _MetaKernels) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by those who look for one
            raise AttributeError(name)
        self._finder.load()
        return getattr(sys.modules[self.__name__], name)


class _Imported(Loader):
    """The loader of a module that was imported while Python looked for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    @classmethod
    def spec_of(cls, name: str) -> ModuleSpec | None:
        """The spec with which Python does not execute a module again; None if it is not there."""
        module = sys.modules.get(name)
        if module is None:
            return None
        module.__spec__ = ModuleSpec(name, cls(module))  # Python takes it from there
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has been executed."""
        module.__spec__ = self._spec


def _can_wait() -> bool:
    """Whether this is a tested version of PyTorch, in which nothing has needed them so far."""
    version = re.match(r"(\d+)\.(\d+)", sys.modules["torch"].__version__)
    tested = version is not None and tuple(map(int, version.groups())) in _TESTED
    return tested and not any(name in sys.modules for name in _NEEDED)
