# SPDX-License-Identifier: Apache-2.0
"""Systems that are written in torch compute on the experiment's device: on a GPU where there is
one, and everywhere on a stand-in that refuses to mix tensors of two devices."""

import importlib

import pandas as pd
import pytest
import torch
from torch.utils import _foreach_utils

from benchmarks.second_device import DEVICE, SecondDevice
from fedrec.data.population import Population
from fedrec.evaluation.central import CentralEvaluation, make_baseline
from fedrec.experiment.loading import load
from fedrec.experiment.tables import EvaluationConfig
from simulations.contracts.base import SMALL

FOLD_IN = {"unseen-users": "fold-in"}
SYSTEMS = {
    "ease": {},
    "ials": {"factors": 4},
    "ials, conjugate gradients": {"factors": 4, "solver": "cg"},
    "neumf": {"epochs": 2, "average": 0.9, **FOLD_IN},
    "neumf, pre-trained": {"epochs": 1, "pretrain-epochs": 1},
    "gmf": {"epochs": 2},
    "mlp": {"epochs": 2},
    "mf": {"epochs": 2},
    "vae": {"epochs": 3},
    "ae": {"epochs": 3},
    "lightgcn": {"epochs": 3, "precision": "bfloat16", **FOLD_IN},
    "privrec": {"rounds": 2, "users": 4, "epochs": 2},
    "dp-gram": {"items": 20},
    "dp-gram, ease": {"model": "ease", "items": 20},
    "dp-als": {"items": 20},
    "dp-fold-in": {},
    "dpmf": {},
    "dpmf, posterior": {"reading": "posterior"},
    "dpae": {"steps": 3, "cohort": 10},
    "dp-svd": {"steps": 3, "cohort": 10, "clip": "optimal"},
}


def measured(label, device):
    """Every metric of every user, and where the scores are."""
    name, settings = label.split(",")[0], SYSTEMS[label]
    protocol = CentralEvaluation(Population.of(load(SMALL)), EvaluationConfig(ks=(5,)))
    baseline = make_baseline(name, settings, seed=1, device=torch.device(device))
    found = protocol.measure(baseline)
    lists = protocol.metrics.of_sums(found.sums)
    return found.users, lists, baseline.scores(protocol.training.block(0, 2)).device


@pytest.fixture
def second_device(monkeypatch):
    """The stand-in; fused kernels of optimisers, which know the names of devices, are told of
    it."""
    known = _foreach_utils._get_fused_kernels_supported_devices()
    for module in (_foreach_utils, importlib.import_module("torch.optim.optimizer")):
        name = "_get_fused_kernels_supported_devices"
        monkeypatch.setattr(module, name, lambda: [*known, DEVICE.type], raising=False)
    return SecondDevice()


@pytest.mark.slow
@pytest.mark.parametrize("label", SYSTEMS)
def test_nothing_is_left_on_the_processor(second_device, label):
    wanted, lists, _ = measured(label, "cpu")
    with second_device:
        found, found_lists, device = measured(label, DEVICE)
    assert device == DEVICE and found_lists == pytest.approx(lists)
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-5)


def test_the_stand_in_refuses_two_devices(second_device):
    with second_device:
        here, there = torch.ones(3), torch.ones(3).to(DEVICE)
        assert (there * 2).cpu().tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="on the processor"):
            here + there
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("label", SYSTEMS)
def test_a_gpu_ranks_like_the_processor(label):
    """Sums of float32 in another order may exchange neighbours in a list."""
    wanted, _, _ = measured(label, "cpu")
    found, _, device = measured(label, "cuda")
    assert device.type == "cuda"
    assert found["mrr"].mean() == pytest.approx(wanted["mrr"].mean(), abs=0.05)
