# SPDX-License-Identifier: Apache-2.0
"""Orders to real nodes: one per node and round."""

import numpy as np
import pytest
from flwr.app import Message

from fedrec.errors import ExperimentError
from fedrec.protocol.messages import pack_train
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.zero_copy import to_record
from server.deployed.federation import DeployedFederation

pytestmark = pytest.mark.usefixtures("identity")
THETA = {"w": np.zeros((4, 2), dtype=np.float32)}


def test_one_message_per_client_is_refused_before_anything_is_sent():
    """Of a node's replies only one is accepted, so all others would be lost."""
    orders = [TrainOrder(1, np.array([client]), "uniform", {"name": "sgd"}) for client in range(4)]
    messages = [
        Message(pack_train(to_record(THETA), order), 7 + number // 3, "train")
        for number, order in enumerate(orders)
    ]
    federation = object.__new__(DeployedFederation)  # without a grid: nothing can be sent
    with pytest.raises(ExperimentError, match="several messages in one round") as error:
        federation.train(messages, THETA)
    assert "3 messages for node 7" in error.value.text()
    assert "reply = .each." in error.value.text().replace(chr(39), ".")
