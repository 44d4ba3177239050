# SPDX-License-Identifier: Apache-2.0
"""PyTorch's meta kernels are imported with what needs them, and not before."""

import subprocess
import sys

import pytest

POSTPONED = """
import sys
from fedrec.nn.meta_kernels import postpone_meta_kernels
postpone_meta_kernels()
import torch
loaded = lambda: "torch._decomp" in sys.modules
assert not loaded() and torch.Generator().manual_seed(1).initial_seed() == 1
edges = torch.arange(3.0)
"""
COMPILED = """
found = torch.compile(lambda x: torch.bucketize(x, x) + 1, backend="eager", fullgraph=True)(edges)
assert found.tolist() == [1, 2, 3] and loaded()
"""
FAKE = """
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    found = torch.randn(3, 4)
    assert torch.bucketize(found, found[0]).shape == (3, 4) and loaded()
"""
EXPORTED = """
found = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
assert "linear" in str(found.graph) and loaded()
"""
META = """
found = torch.empty(3, 4, device="meta")
assert (found @ found.T).shape == (3, 3)
try:
    torch.bucketize(found, found[0])
except NotImplementedError as error:
    assert "Meta kernel" in str(error)
else:
    raise AssertionError("an operation without a kernel is not refused")
import torch._decomp
assert torch.bucketize(found, found[0]).shape == (3, 4)
"""
TRACED = """
from torch.fx.experimental.proxy_tensor import make_fx
assert "bucketize" in str(make_fx(lambda x: torch.bucketize(x, x))(edges).graph)
"""
DUAL = """
value, slope = torch.func.jvp(lambda x: (x * x).sum(), (edges,), (torch.ones(3),))
assert (value, slope) == (5, 6) and loaded()
"""
IMPORTED = """
import torch._refs, torch._prims, torch.utils._content_store
assert torch._refs.__spec__.origin == torch._refs.__file__ and torch._refs.__path__
from torch._meta_registrations import pooling_output_shape
assert torch._meta_registrations.__file__.endswith("_meta_registrations.py")
"""
ASKED_FOR = """
assert torch.broadcast_shapes((2,), (3, 1)) == (3, 2) and loaded()
assert torch._meta_registrations.pooling_output_shape
"""
WITHOUT = """
normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
assert normal.sample().shape == (2,)
layer = torch.nn.GRU(4, 5, batch_first=True)
layer(torch.ones(2, 3, 4))[0].sum().backward()
assert layer.weight_hh_l0.grad is not None and not loaded()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", [COMPILED, FAKE, EXPORTED, META, TRACED, DUAL, IMPORTED, ASKED_FOR, WITHOUT]
)
def test_what_needs_them_finds_them(work):
    subprocess.run([sys.executable, "-c", POSTPONED + work], check=True)


EARLIER = """
import sys
import torch
from fedrec.nn.meta_kernels import postpone_meta_kernels
finders = len(sys.meta_path)
postpone_meta_kernels()
assert len(sys.meta_path) == finders and "torch._decomp" in sys.modules
"""
OTHER_VERSION = """
import sys
from importlib.machinery import ModuleSpec
from fedrec.nn import meta_kernels
meta_kernels._TESTED = {(2, 0)}
meta_kernels.postpone_meta_kernels()
meta_kernels.postpone_meta_kernels()
import torch
assert "torch._decomp" in sys.modules
assert sum(type(one).__module__ == meta_kernels.__name__ for one in sys.meta_path) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", [EARLIER, OTHER_VERSION])
def test_nothing_is_left_out_of_what_is_not_known_or_already_imported(work):
    subprocess.run([sys.executable, "-c", work], check=True)
