# SPDX-License-Identifier: Apache-2.0
"""Ten broken aggregators, each with the check that must catch it."""

import dataclasses
from dataclasses import replace

import dp_checks
import numpy as np
import pytest
import torch
from dp_checks import Parts

from clients.training.update_sum import UpdateSum
from fedrec.privacy.clipping import Clip
from fedrec.privacy.noise_source import Reproducible
from fedrec.protocol.sparse_update import dense_change
from strategies.dp import DpFedAvg
from strategies.reptile import Reptile

pytestmark = pytest.mark.usefixtures("identity")


class Scaled(DpFedAvg):
    """Adds noise with a factor."""

    factor = 1.0

    def release(self, round_number, theta, sums):
        plan = self.plan
        wrong = plan.per_clip_norm * self.factor
        self.plan = dataclasses.replace(plan, per_clip_norm=wrong)
        try:
            return super().release(round_number, theta, sums)
        finally:
            self.plan = plan


class NoNoise(Scaled):
    factor = 0.0


class HalfNoise(Scaled):
    factor = 0.5


class NoiseByRootOfClients(Scaled):
    factor = dp_checks.CLIENTS**-0.5


class SameSeed(DpFedAvg):
    """Draws the noise of round 1 in every round."""

    def release(self, round_number, theta, sums):
        return super().release(1, theta, sums)


class SameStream(DpFedAvg):
    """Draws all parameters' noise from one stream."""

    def __init__(self, plan, phase, source, charge):
        class Nameless(Reproducible):
            def gaussian(self, size, name, *address):
                return super().gaussian(size, "", *address)

        super().__init__(plan, phase, Nameless(source.seed), charge)


class TouchedRowsOnly(DpFedAvg):
    """Adds no noise to untouched rows."""

    def release(self, round_number, theta, sums):
        noisy = super().release(round_number, theta, sums)
        for name, value in noisy.items():
            dense = [dense_change(reply.total[name], theta[name]) for reply, _ in sums]
            value[~np.any(dense, axis=0)] = 0
        return noisy


class Believing(DpFedAvg):
    """Does not bound nodes' sums."""

    def _bounded(self, total, names, theta, asked):
        return total


class Unclipped(UpdateSum):
    def _shares(self, examples, norms):
        return [float(np.isfinite(norm)) for norm in norms]


class Weighted(UpdateSum):
    """Clips, and then weights by examples."""

    def _shares(self, examples, norms):
        return [
            share * count
            for share, count in zip(super()._shares(examples, norms), examples, strict=True)
        ]


class ClippedByTensor(UpdateSum):
    """Clips every parameter separately."""

    def _shares(self, examples, norms):
        return [1.0] * len(examples)

    def add_block(self, clients, trained):
        clip = Clip(self.protection.clip_norm)
        changes = {
            name: torch.from_numpy(clip({name: change.numpy()})[name])
            for name, change in trained.changes.items()
        }
        super().add_block(clients, replace(trained, changes=changes))


class Survivors(Reptile):
    """Divides by the clients that answered."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.answered = sum(not reply.has_error() for reply in replies)
        return super().aggregate_train(server_round, replies)

    def apply(self, theta, aggregate):
        nodes = len(self.cohorts.by_node(self.cohorts.sample(1)))
        return super().apply(
            theta, dataclasses.replace(aggregate, clients=aggregate.clients * self.answered / nodes)
        )


class Resampling(Reptile):
    """Draws replacements for failed clients."""

    def configure_train(self, server_round, arrays, config, grid):
        self.messages = list(super().configure_train(server_round, arrays, config, grid))
        return self.messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        failed = [reply.metadata.src_node_id - 100 for reply in replies if reply.has_error()]
        self.cohorts.clients = np.setdiff1d(self.cohorts.clients, failed)
        return super().aggregate_train(server_round, replies)


MUTANTS = {
    "no noise": (Parts(privacy=NoNoise), dp_checks.noise_has_the_accounted_scale),
    "half the noise": (Parts(privacy=HalfNoise), dp_checks.noise_has_the_accounted_scale),
    "noise / sqrt(M)": (
        Parts(privacy=NoiseByRootOfClients),
        dp_checks.noise_has_the_accounted_scale,
    ),
    "same seed every round": (Parts(privacy=SameSeed), dp_checks.noise_is_drawn_anew),
    "same seed for every parameter": (Parts(privacy=SameStream), dp_checks.noise_is_drawn_anew),
    "noise on touched rows only": (Parts(privacy=TouchedRowsOnly), dp_checks.every_row_has_noise),
    "no clip": (
        Parts(total=Unclipped, privacy=Believing),
        dp_checks.sum_moves_by_two_clip_norms_at_most,
    ),
    "weighted mean": (Parts(total=Weighted, privacy=Believing), dp_checks.clients_count_the_same),
    "clip per tensor": (
        Parts(total=ClippedByTensor, privacy=Believing),
        dp_checks.norm_is_that_of_all_parameters,
    ),
    "survivors as denominator": (Parts(strategy=Survivors), dp_checks.denominator_is_fixed),
    "resampling after failure": (
        Parts(strategy=Resampling),
        dp_checks.nobody_is_drawn_for_a_failed_client,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_broken_aggregator_is_caught(mutant):
    parts, check = MUTANTS[mutant]
    check(Parts())
    with pytest.raises(AssertionError):
        check(parts)


def test_a_scale_that_is_one_percent_off_is_caught():
    for factor in (0.99, 1.01):
        mutant = type("Off", (Scaled,), {"factor": factor})
        with pytest.raises(AssertionError):
            dp_checks.noise_has_the_accounted_scale(Parts(privacy=mutant))
