# SPDX-License-Identifier: Apache-2.0
"""FedJAX (PyPI `fedjax`): its FedAvg client functions over its `for_each_client` backend `pmap` or
`jit`.

Chosen in its favour, all of it FedJAX's own:
- `pmap` over two devices of the host, one per core, trains two users at a time, sorted by size so
  that pairs are alike; `jit` trains one user after the other and takes less CPU time for each, but
  mostly on one core;
- `padded_batch` with one size: every batch has one shape, so all is compiled in the first round,
  which is not counted;
- `tree_mean` with donated buffers, and no norms of updates as diagnostics.
The batches are those of the work in its order, by one `ClientDataset` per epoch.
`shuffle_repeat_batch` would draw an order of its own, and fill the last batch of an epoch with
examples of the next.

FedJAX 0.0.17 calls `jax.tree_map`, which jax 0.6.0 removed: 0.5.3 is the newest jax that it runs
with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fedjax.algorithms.fed_avg import create_train_for_each_client

from benchmarks.contestants.archive import BATCH, LEARNING_RATE, Arrays, RoundClock


def network(work: Arrays) -> fedjax.Model:
    """PrivRec's network."""
    names = list(work.initial())
    users = [name for name in names if name.startswith("user.")]
    layers = [
        name.removesuffix(".weight")
        for name in names
        if name.startswith("layer") and name.endswith(".weight")
    ]
    genres = jnp.asarray(np.maximum(work["genres"], 0), jnp.int32)
    present = jnp.asarray(work["genres"] >= 0, jnp.float32)[..., None]

    def apply(
        params: fedjax.Params, batch: fedjax.BatchExample, rng: fedjax.PRNGKey | None = None
    ) -> jax.Array:
        items = batch["items"]
        parts = [params[name][batch["user"][:, index]] for index, name in enumerate(users)]
        here = present[items]
        pooled = (params["item.genres"][genres[items]] * here).sum(1) / jnp.maximum(here.sum(1), 1)
        hidden = jnp.concatenate([*parts, params["item.id"][items], pooled], 1)
        for layer in layers:
            hidden = hidden @ params[f"{layer}.weight"] + params[f"{layer}.bias"]
            hidden = jax.nn.relu(hidden) if layer != layers[-1] else hidden
        return hidden[:, 0]

    def loss(batch: fedjax.BatchExample, logits: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits, batch["labels"])

    return fedjax.Model(lambda rng: work.initial(), apply, apply, loss, {})


def batches(work: Arrays, index: int) -> Iterator[fedjax.BatchExample]:
    """The padded batches of one user in one round; `index` counts through the rounds and their
    cohorts."""
    user = work["users"].reshape(-1, work["users"].shape[-1])[index].astype(np.int32)
    for items, labels in work.epochs(index):
        examples = {
            "items": items.astype(np.int32),
            "labels": labels,
            "user": np.tile(user, (len(items), 1)),
        }
        yield from fedjax.ClientDataset(examples).padded_batch(batch_size=BATCH)


def clipped(change: fedjax.Params, norm: float) -> fedjax.Params:
    """A user's change, clipped to a norm over all of it together, unless that is 0."""
    return fedjax.tree_util.tree_clip_by_global_norm(change, norm) if norm else change


def main(path: str, backend: str) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    jax.config.update("jax_num_cpu_devices", 2 if backend == "pmap" else 1)
    # what FedJAX's pmap backend was written for
    jax.config.update("jax_pmap_no_rank_reduction", False)
    work = Arrays(path)
    rounds, cohort = work["cohorts"].shape
    server = fedjax.optimizers.sgd(1.0)
    with fedjax.for_each_client_backend(backend):
        train = create_train_for_each_client(
            fedjax.model_grad(network(work)), fedjax.optimizers.sgd(LEARNING_RATE)
        )
    # placed like later rounds' means, or one step compiles twice
    params = jax.device_put(work.initial(), jax.devices()[0])
    state = server.init(params)
    key = jax.random.PRNGKey(0)
    clock = RoundClock()
    for number in range(rounds):
        clock.begin()
        clients = [
            (index, batches(work, index), key)
            for index in range(number * cohort, (number + 1) * cohort)
        ]
        mean = fedjax.tree_util.tree_mean(
            (clipped(change, work.clip), 1.0) for _, change in train(params, clients)
        )
        state, params = server.apply(mean, state, params)
        jax.block_until_ready(params)
        clock.end()
    initial = work.initial()
    print(clock.report([np.asarray(params[name]) for name in initial], list(initial.values())))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
