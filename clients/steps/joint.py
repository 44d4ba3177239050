# SPDX-License-Identifier: Apache-2.0
"""Local SGD on recommendation and self-supervision together (PrivRec section 2.4.3, equation 11).

    L = lambda_DSSM * L_DSSM + L_SSL,  L_SSL = lambda_IM * L_IM + lambda_SM * L_SM

Where this differs from the paper: the paper does not define a batch. Here batches of labelled
examples are those of local SGD, and the session views of an epoch are distributed evenly over its
batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from clients.local.sessions import SessionStep, SessionStepConfig
from clients.steps.sgd import Sgd, SgdConfig
from fedrec.cohort.batches import Batches
from fedrec.cohort.descent import Recommending
from fedrec.data.client_data import ClientData
from fedrec.models.base import Parameters
from fedrec.pretext.blocks import SessionBatches, SessionObjective


class JointConfig(SgdConfig, SessionStepConfig):
    """Settings of local SGD and of the self-supervised task."""

    lambda_dssm: float = Field(default=1.0, ge=0)
    """Weight of the recommender's loss (lambda_DSSM, eq. 11)."""


class Joint(SessionStep, Sgd):
    """Local SGD on the recommender's loss plus the loss on masked views of the client's
    sessions."""

    name = "joint"
    Config = JointConfig
    paper = "PrivRec (Wang et al. 2021), eq. 11"
    config: JointConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work."""
        epochs = list(self._joint_epochs(data, random))
        plain = Batches.cut([examples for examples, _ in epochs], self.config.batch_size)
        return SessionBatches.deal(
            plain, [views for _, views in epochs], self.config.batch_size, self.task.layout
        )

    def objective(self) -> SessionObjective:
        """Both losses."""
        return SessionObjective(self.task, Recommending(self.model), self.config.lambda_dssm)

    def trained(self, parameters: Parameters) -> Parameters:
        """All, the encoders too."""
        return parameters

    def _joint_epochs(
        self, data: ClientData, random: np.random.Generator
    ) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
        """Examples (items, labels) and views of each epoch, in the order of training."""
        for examples in self._epochs(data, random):
            yield examples, self.task.views(data, random)
