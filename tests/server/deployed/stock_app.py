# SPDX-License-Identifier: Apache-2.0
"""A ClientApp written from Flower's documentation alone (its PyTorch quickstart); it imports
nothing of fedrec."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

ITEMS, WIDTH = 30, 4


class Net(nn.Module):
    """Scores an item by a linear layer over its embedding."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, items):
        return self.score(self.items(items)).squeeze(-1)


def load_data(partition_id: int):
    """This node's own data: item numbers and whether they were liked."""
    generator = torch.Generator().manual_seed(partition_id)
    items = torch.randint(ITEMS, (20 + partition_id,), generator=generator)
    return items, (items % 3 == partition_id % 3).float()


def train_fn(net, data, epochs: int, lr: float) -> float:
    """Full-batch SGD; gives the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(data[0]), data[1])
        loss.backward()
        optimizer.step()
    return float(loss)


app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"])
    loss = train_fn(
        model, data, context.run_config.get("local-epochs", 2), msg.content["config"].get("lr", 0.5)
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[0])})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg
    )


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    items, labels = load_data(context.node_config["partition-id"])
    right = float(((model(items) > 0).float() == labels).float().mean())
    metrics = MetricRecord({"eval_acc": right, "num-examples": len(items)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
