# SPDX-License-Identifier: Apache-2.0
"""Contract tests, one class per kind of component; `fedrec.testing` exports them."""

from simulations.contracts.attack import AttackContract
from simulations.contracts.baseline import BaselineContract
from simulations.contracts.callback import CallbackContract
from simulations.contracts.dataset import DatasetContract
from simulations.contracts.mechanism import MechanismContract
from simulations.contracts.metric import MetricContract
from simulations.contracts.model import ModelContract
from simulations.contracts.perturbation import PerturbationContract
from simulations.contracts.sampler import SamplerContract
from simulations.contracts.split import SplitContract
from simulations.contracts.step import StepContract
from simulations.contracts.strategy import StrategyContract

__all__ = [
    "AttackContract",
    "BaselineContract",
    "CallbackContract",
    "DatasetContract",
    "MechanismContract",
    "MetricContract",
    "ModelContract",
    "PerturbationContract",
    "SamplerContract",
    "SplitContract",
    "StepContract",
    "StrategyContract",
]
