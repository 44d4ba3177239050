# SPDX-License-Identifier: Apache-2.0
"""Local training of one client after the other, with whole item tables and automatic
differentiation: independent of the blocks that the steps train, and compared with them."""

import functools
import math

import numpy as np
import torch
from torch.nn import functional as F

from clients.steps import als, personal, sgd, vae
from clients.steps.als import MOMENTS
from clients.steps.descent import Update, one_by_one
from clients.steps.own_noise import clipped_mean
from clients.steps.personal import BIAS, ITEMS, PERSONAL, WEIGHT
from clients.steps.vae import generator_of
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.data.interactions import Schema
from fedrec.models.vae import Prior
from fedrec.nn.layers import gather_rows
from fedrec.pretext import recommender_part
from fedrec.sums.products import packed
from fedrec.training.block import Block, OwnData
from fedrec.training.sgd import SgdSettings


def labelled(
    data: ClientData, schema: Schema, negatives: int, low_rated: str, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Items and labels, drawn by numpy."""
    items = data.items
    labels = data.labels
    if schema.task == "rating":
        return items, labels
    if low_rated == "ignore":
        items = items[labels > 0]
        labels = labels[labels > 0]
    count = negatives * int((labels > 0).sum())
    if not count or len(data.never_negative) >= schema.num_items:
        return items, labels
    drawn = draw_negatives(data.never_negative, schema.num_items, count, random)
    return np.concatenate([items, drawn]), np.concatenate(
        [labels, np.zeros(count, dtype=np.float32)]
    )


class OneByOne:
    """A step that trains each client by `alone`."""

    def batches(self, data, random):
        return OwnData.of(data, random)

    def block(self, users, batches, device):
        return Block.of(users, batches, device)

    def train_block(self, parameters, block, client_params=None):
        return one_by_one(parameters, block, client_params, self.alone)

    def in_kernel(self):
        return "an oracle"


class LocalDescent:
    """One client's parameters while they are trained.

    Args:
        start: the parameters that are trained, without cohort dimension; unchanged.
        sgd: settings of the gradient steps.

    Attributes:
        values: `[1, ...]` each.
    """

    def __init__(self, start, sgd):
        self.start = start
        self.sgd = sgd
        self.values = {name: value.detach().unsqueeze(0).clone() for name, value in start.items()}

    def step(self, loss, held=frozenset()):
        leaves = {name: value.requires_grad_() for name, value in self.values.items()}
        measured = loss(leaves).sum()
        gradients = torch.autograd.grad(
            measured, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
                if self.sgd.proximal_mu:
                    gradient = gradient + self.sgd.proximal_mu * (value - self.start[name])
                value.detach_().sub_(gradient, alpha=0.0 if name in held else self.sgd.rate(name))
        return measured.detach()

    def delta(self, parameters):
        return {
            name: self.values[name].squeeze(0) - value
            if name in self.values
            else torch.zeros_like(value)
            for name, value in parameters.items()
        }


def in_batches(epochs, size, device, step):
    examples = 0
    loss = math.nan
    for epoch in epochs:
        items, labels = (torch.from_numpy(array).to(device) for array in epoch)
        examples = len(items)
        loss = float(np.mean(list(map(step, items.split(size), labels.split(size)))))
    return examples, loss


def epochs(step, data, random):
    """Items and labels of each epoch of local SGD, in the order of training."""
    config = step.config
    if not config.epochs:
        return
    pool = labelled(data, step.model.schema, config.negatives, config.low_rated, random)
    for _ in range(config.epochs):
        order = random.permutation(len(pool[0]))
        yield pool[0][order], pool[1][order]


class Sgd(OneByOne, sgd.Sgd):
    def alone(self, parameters, data, random):
        trained = recommender_part(parameters)
        sgd = self.settings(list(trained))
        descent = LocalDescent(trained, sgd)
        users = tuple(
            torch.from_numpy(codes).to(self.device).unsqueeze(0) for codes in data.features
        )
        examples = 0
        loss = float("nan")
        for epoch, (items, labels) in enumerate(epochs(self, data, random)):
            held = self._held(sgd, epoch)
            examples = len(items)
            starts = range(0, examples, self.config.batch_size)
            batches = [slice(start, start + self.config.batch_size) for start in starts]
            losses = [
                descent.step(self._loss(users, items[batch], labels[batch]), held)
                for batch in batches
            ]
            loss = float(torch.stack(losses).mean()) if losses else loss
        return Update(descent.delta(parameters), examples, loss)

    def _held(self, sgd, epoch):
        return sgd.late if epoch < self.config.epochs - 1 else frozenset()

    def _loss(self, users, items, labels):
        batch = torch.tensor(items[None], device=self.device)
        targets = torch.tensor(labels[None], device=self.device)
        return lambda parameters: self.model.loss(
            self.model.predict(parameters, users, batch), targets
        )


def one_history(model, items):
    """A user's history, `[1, 1, items]`, from its liked items."""
    history = torch.zeros(1, 1, model.schema.num_items)
    history[0, 0, torch.from_numpy(items)] = 1.0
    return history


def prior_of(priors, data):
    """A client's noisy prior, `[1, 1, K]`."""
    return Prior(*(torch.from_numpy(part)[None, None] for part in priors.of(data)))


def loss_from_table(task, parameters, views):
    """The session loss, with the embeddings taken from the item table among the parameters."""
    embeddings = gather_rows(parameters[task.table], views.clamp(min=0))
    return task.loss(parameters, embeddings, views)


class Vae(OneByOne, vae.VaeStep):
    def alone(self, parameters, data, random):
        if not len(data.positives):
            return Update(
                {name: torch.zeros_like(value) for name, value in parameters.items()}, 0, math.nan
            )
        descent = LocalDescent(parameters, SgdSettings(self.config.learning_rate))
        history = one_history(self.model, data.positives).to(self.device)
        loss = math.nan
        beta = self.config.beta
        prior = None if self.priors is None else prior_of(self.priors, data)
        for _ in range(self.config.epochs):
            draw = self.model.draw((1, 1), generator_of(random)).to(self.device)

            def objective(values, draw=draw):
                return self.model.negative_elbo(values, history, draw, beta, prior)

            loss = float(descent.step(objective))
        return Update(descent.delta(parameters), min(1, self.config.epochs), loss)


class DpVae(OneByOne, vae.DpVae):
    def alone(self, parameters, data, random):
        if self.config.epochs == 0:
            return Update(
                {name: torch.zeros_like(value) for name, value in parameters.items()}, 1, math.nan
            )
        gradients, loss = self.gradients(parameters, data, random)
        bound = self.bound(gradients, data.client)
        uploaded = self.uploaded(clipped_mean(gradients, bound), bound, data.client, random)
        return Update(
            self.shaped(uploaded, parameters), 1, loss if self.config.mode == "paper" else math.nan
        )

    def gradients(self, parameters, data, random):
        network = parameters
        number = len(data.positives)
        if not number:
            return torch.zeros(
                0, sum(v.numel() for v in network.values()), device=self.device
            ), math.nan
        items = random.choice(data.positives, size=min(self.config.examples, number), replace=False)
        history = one_history(self.model, data.positives).to(self.device)
        draw = self.model.draw((1, 1), generator_of(random)).to(self.device)
        leaves = {
            name: value.detach().unsqueeze(0).requires_grad_() for name, value in network.items()
        }
        targets = torch.zeros(1, len(items), self.model.schema.num_items, device=self.device)
        targets[0, torch.arange(len(items)), torch.from_numpy(items)] = 1.0
        prior = None if self.priors is None else prior_of(self.priors, data)
        log_chances, distances = self.model.parts(leaves, history, draw, prior)
        losses = (self.config.beta / number * distances - (log_chances * targets).sum(-1))[0]
        losses = losses.mean(0, keepdim=True) if self.config.clip == "user" else losses
        each = torch.eye(len(losses), device=self.device)
        found = torch.autograd.grad(losses, list(leaves.values()), each, is_grads_batched=True)
        return torch.cat([gradient.flatten(1) for gradient in found], 1), float(
            losses.detach().mean()
        )


class Als(OneByOne, als.Als):
    def alone(self, parameters, data, random):
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        items = parameters["item.factors"].double()
        target = torch.zeros(len(items), dtype=torch.float64, device=items.device)
        target[data.items] = self.config.low_rated
        target[data.positives] = 1.0
        liked = target.nonzero()[:, 0].cpu()
        if not len(liked) or not self.config.epochs:
            return Update(delta, 0, math.nan)
        own_shares = target[liked, None]
        weights = 1 + (self.config.weight - 1) * target
        penalty = self.config.regularisation * torch.eye(items.shape[1]).to(items)
        matrix = items.T @ (weights[:, None] * items) + penalty
        own = torch.linalg.solve(matrix, self.config.weight * (items.T @ target))
        outer = torch.outer(own, own)
        fitted = items @ own
        delta["user.factors"] = own.to(parameters["user.factors"]) - parameters["user.factors"]
        delta["user.gram"] = outer.to(delta["user.gram"])
        if MOMENTS in parameters:
            delta[MOMENTS][liked] = (own_shares * packed(outer)).to(delta[MOMENTS])
            delta["item.right"][liked] = (own_shares * own).to(delta["item.right"])
        else:
            shares = self.config.weight - (self.config.weight - 1) * fitted[liked]
            sent = own_shares * torch.outer(shares, own)
            delta["item.right"][liked] = sent.to(delta["item.right"])
        loss = target * self.config.weight * (1 - fitted).square() + (1 - target) * fitted.square()
        loss = loss.mean()
        return Update(delta, len(liked), float(loss))


def epochs_of(step, data, random):
    """Items and labels of each epoch, in the order of training."""
    if not step.config.epochs:
        return
    items, labels = labelled(data, step.model.schema, 4, "ignore", random)
    for _ in range(step.config.epochs if len(items) else 0):
        order = random.permutation(len(items))
        yield items[order], labels[order]


class Fedrap(OneByOne, personal.FedrapStep):
    def alone(self, parameters, data, random):
        values = {name: value.clone() for name, value in parameters.items()}
        examples, loss = in_batches(
            epochs_of(self, data, random),
            personal.SHUFFLED_BATCH,
            self.device,
            functools.partial(self._descend, values),
        )
        return Update(
            {name: values[name] - value for name, value in parameters.items()}, examples, loss
        )

    def _descend(self, values, items, labels):
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        given = {name: value.unsqueeze(0) for name, value in leaves.items()}
        predicted = self.model.predict(given, (), items[None])[0]
        entropy = F.binary_cross_entropy_with_logits(predicted, labels)
        shared = leaves[ITEMS][items]
        personal = leaves[PERSONAL][items]
        loss = entropy - self.config.apart * (personal - shared).square().mean()
        loss = loss + self.config.sparse * shared.abs().mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
            values[name] = value.detach() - self._rates()[name] * gradient
        return float(entropy.detach())


class Pfedrec(OneByOne, personal.PfedrecStep):
    def alone(self, parameters, data, random):
        values = {name: value.clone() for name, value in parameters.items()}
        examples, loss = in_batches(
            epochs_of(self, data, random),
            personal.SHUFFLED_BATCH,
            self.device,
            functools.partial(self._turns, values),
        )
        return Update(
            {name: values[name] - value for name, value in parameters.items()}, examples, loss
        )

    def _turns(self, values, items, labels):

        def loss(leaves):
            given = {name: value.unsqueeze(0) for name, value in leaves.items()}
            predicted = self.model.predict(given, (), items[None])[0]
            return F.binary_cross_entropy_with_logits(predicted, labels)

        first = None
        rate = self.config.learning_rate
        for names, size in (((WEIGHT, BIAS), rate), ((ITEMS,), rate * self.config.item_rate)):
            leaves = {
                name: value.detach().requires_grad_(name in names) for name, value in values.items()
            }
            measured = loss(leaves)
            first = float(measured.detach()) if first is None else first
            for name, gradient in zip(
                names, torch.autograd.grad(measured, [leaves[n] for n in names]), strict=True
            ):
                values[name] = values[name] - size * gradient
        return float("nan") if first is None else first


ORACLES = (Sgd, Vae, DpVae, Als, Fedrap, Pfedrec)


def with_oracle(node):
    """The node with an oracle in place of its step."""
    made = node.step
    by_step = {oracle.__mro__[2]: oracle for oracle in ORACLES}

    def step(section, round_=None):
        own = made(section, round_)
        return by_step[type(own)](own.config, node.model, node.device)

    node.step = step
    return node


def update_under(step, given, data, random):
    """The update of one client under parameters that a server sent to it, whole tables."""
    block = step.block([data.features], [step.batches(data, random)], step.device)
    tables = [name for name in ("item.id", "item.guide", "item.low") if name in given]
    own = {n: (v[block.touched[0]] if n in tables else v).unsqueeze(0) for n, v in given.items()}
    trained = step.train_block({}, block, own)
    delta = {name: torch.zeros_like(value) for name, value in given.items()}
    for name, change in trained.changes_of(0).items():
        if name in tables:
            delta[name][block.touched[0]] = change
        else:
            delta[name] = change
    return Update(delta, block.examples[0], trained.losses()[0])
