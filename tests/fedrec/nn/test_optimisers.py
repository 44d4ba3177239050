# SPDX-License-Identifier: Apache-2.0
"""The optimisers take PyTorch's steps and leave its compiler out."""

import subprocess
import sys

import pytest
import torch

from fedrec.nn.optimisers import SGD, Adam, AdamW

WITHOUT_COMPILER = """
import sys
import torch
from fedrec.nn.optimisers import SGD, Adam, AdamW
for made in (SGD, Adam, AdamW):
    value = torch.ones(3, requires_grad=True)
    optimiser = made([value], lr=0.1)
    optimiser.zero_grad()
    value.sum().backward()
    optimiser.step()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_the_compiler_is_not_imported():
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    assert subprocess.check_output(command, text=True).strip() == "False"


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"fused": True}),
        (Adam, torch.optim.Adam, {}),
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_steps_are_pytorch_s(ours, theirs, settings):
    values = []
    for made in (ours, theirs):
        value = torch.linspace(-1, 1, 7, requires_grad=True)
        optimiser = made([{"params": [value], "lr": 0.1}], **settings)
        falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, 5)
        for _ in range(5):
            optimiser.zero_grad()
            value.sin().sum().backward()
            optimiser.step()
            falling.step()
        assert value.requires_grad and torch.is_grad_enabled()
        values.append(value.detach())
    assert torch.equal(*values)
