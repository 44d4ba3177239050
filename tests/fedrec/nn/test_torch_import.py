# SPDX-License-Identifier: Apache-2.0
"""The import of PyTorch in fedrec's own processes."""

import subprocess
import sys

import pytest

SHORTENED = """
import inspect, sys
from fedrec.nn.torch_import import shorten_torch_import
shorten_torch_import()
found = dict(inspect.modulesbyfile)
import torch
assert found and all(sys.modules[name].__file__ == file for file, name in found.items())
assert inspect.modulesbyfile == found, "the files of all modules have been compared"
assert "torch._decomp" not in sys.modules
assert inspect.getmodule(torch.nn.Linear.forward) is torch.nn.modules.linear
"""
EARLIER = """
import inspect, sys
import torch
from fedrec.nn.torch_import import shorten_torch_import
known = dict(inspect.modulesbyfile)
shorten_torch_import()
assert inspect.modulesbyfile == known and "torch._decomp" in sys.modules
"""
WITHOUT_ANSWERS = """
import inspect
del inspect.modulesbyfile
from fedrec.nn.torch_import import shorten_torch_import
shorten_torch_import()
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", [SHORTENED, EARLIER, WITHOUT_ANSWERS])
def test_what_fedrecs_processes_do_not_need_is_left_out(work):
    subprocess.run([sys.executable, "-c", work], check=True)
