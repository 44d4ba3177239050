# SPDX-License-Identifier: Apache-2.0
"""Self-supervised training of the item embedding on a client's own sessions (PrivRec section 2.4.2,
equations 8 to 10).

No label and no feature of the user is used: stage one of the two-stage training. Only the item
embedding and the encoders of sessions and items (`session.*`) are trained; no other parameter
changes, not even by weight decay.

Where this differs from the paper: see `fedrec/pretext/views.py` and `contrast.py`. The paper does
not give learning rate, batch size and epochs of stage one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clients.local.sessions import SessionStep, SessionStepConfig
from fedrec.cohort.batches import Batches
from fedrec.data.client_data import ClientData
from fedrec.models.base import Parameters
from fedrec.pretext.blocks import SessionBatches
from fedrec.pretext.encoder import PREFIX


class ContrastiveConfig(SessionStepConfig):
    """Settings of self-supervised training; a batch is of pairs of views."""


class Contrastive(SessionStep):
    """Local SGD on masked views of the client's sessions."""

    name = "contrastive"
    Config = ContrastiveConfig
    paper = "PrivRec (Wang et al. 2021), eq. 8-10"
    config: ContrastiveConfig

    def batches(self, data: ClientData, random: np.random.Generator) -> Batches:
        """All batches of one client's local work."""
        epochs = list(self._epochs(data, random))
        return SessionBatches.deal(Batches.none(), epochs, self.config.batch_size, self.task.layout)

    def trained(self, parameters: Parameters) -> Parameters:
        """The item embedding and the encoders."""
        return {
            n: value
            for n, value in parameters.items()
            if n == self.task.table or n.startswith(PREFIX)
        }

    def _epochs(self, data: ClientData, random: np.random.Generator) -> Iterator[np.ndarray]:
        """The views of each epoch, in the order of training."""
        for _ in range(self.config.epochs):
            yield self.task.views(data, random)
