# SPDX-License-Identifier: Apache-2.0
"""Contracts fail for components that break them."""

import inspect
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from clients.steps.descent import Update
from clients.steps.sgd import Sgd
from fedrec import testing
from fedrec.baselines.closed_form import Popularity
from fedrec.compression.codec import Rounding
from fedrec.config import Config
from fedrec.data.interactions import FeatureNames
from fedrec.data.readers.synthetic import Synthetic
from fedrec.data.splits.rules import Partition, UserHoldout
from fedrec.errors import ROOT, ClientError
from fedrec.models.mf import Mf
from fedrec.models.privrec import PrivRec
from fedrec.perturb.substitutes import RandomReplacement
from fedrec.privacy.mechanisms import Gaussian
from server.callbacks import Callback
from server.samplers import FixedSizeSampler
from simulations.attacks.base import Fit
from simulations.contracts.training import ModelContract
from simulations.poisoning import RandomProfiles
from strategies.sums import Reptile
from tests.clients import oracles

# Each contract test fails for a component that breaks what the test is for.

counted = itertools.count(1).__next__
"""A number of calls, on which a component must not depend."""


class BareConfig(Config):
    """A setting without a description."""

    size: int = 3


class Bare(Popularity):
    Config = BareConfig


class Remembering(oracles.Sgd):
    def alone(self, parameters, data, random):
        found = super().alone(parameters, data, random)
        return Update(
            {n: v * counted() for n, v in found.delta.items()}, found.examples, found.loss
        )


class Deaf(oracles.Sgd):
    def alone(self, parameters, data, random):
        return super().alone(parameters, data, np.random.default_rng(0))


class Idle(oracles.Sgd):
    def alone(self, parameters, data, random):
        return Update({n: torch.zeros_like(v) for n, v in parameters.items()}, 0, 0.0)


class Eager(oracles.Sgd):
    def alone(self, parameters, data, random):
        return Update({n: torch.ones_like(v) for n, v in parameters.items()}, 1, 0.0)


class Fragile(oracles.Sgd):
    def alone(self, parameters, data, random):
        assert data.items.max() >= 0  # an empty array has no maximum
        return super().alone(parameters, data, random)


class OtherwiseInBlocks(Sgd):
    def train_block(self, parameters, block, client_params=None):
        trained = super().train_block(parameters, block, client_params)
        compact = block.touched.shape[1] < self.model.schema.num_items
        trained.values("layer0.bias")[:] += 0.01 * compact
        return trained


class Crowded(Sgd):
    def train_block(self, parameters, block, client_params=None):
        trained = super().train_block(parameters, block, client_params)
        trained.values("layer0.bias")[:] += 0.01 * len(block)
        return trained


class Unbounded(Sgd):
    """The upload after the clip is not accessible here, so its norm is misreported."""

    def train_block(self, parameters, block, client_params=None):
        import dataclasses

        trained = super().train_block(parameters, block, client_params)

        class Short(type(trained)):
            def norms(self, names=None, order=2):
                return super().norms(names, order) / 10

        return Short(**{f.name: getattr(trained, f.name) for f in dataclasses.fields(trained)})


class Mixing(PrivRec):
    def predict(self, parameters, users, items, rows=None):
        found = super().predict(parameters, users, items, rows)
        return found + found.mean()


class Unseeded(PrivRec):
    def initial(self, generator):
        return super().initial(torch.Generator().manual_seed(counted()))


class Reversed(PrivRec):
    def scores(self, parameters, users):
        return super().scores(parameters, users).flip(1)


class Summed(PrivRec):
    def loss(self, predictions, labels, weights=None):
        return super().loss(predictions, labels, weights).sum()


class Forgetting(Reptile):
    """Momentum that is not saved."""

    def apply(self, theta, aggregate):
        self.speed = getattr(self, "speed", 0) + 1
        return aggregate.added_to(theta, self.speed / aggregate.clients)


class PerNode(Reptile):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        return super().aggregate_train(server_round, replies[:1])


class Loose(Reptile):
    """Has clients clip to ten times the clip norm."""

    @property
    def privacy(self):
        return self._privacy

    @privacy.setter
    def privacy(self, privacy):
        if privacy is not None:
            privacy.plan = privacy.plan.at_clip_norm(10 * privacy.plan.clip_norm)
        self._privacy = privacy


class Unprotected(Reptile):
    """Accepts the privacy and ignores it."""

    privacy = property(lambda self: None, lambda self, privacy: None)


class Still(Reptile):
    def apply(self, theta, aggregate):
        return theta


class Restless(Synthetic):
    def read(self):
        from dataclasses import replace

        data = super().read()
        return replace(data, items=(data.items + counted()) % data.num_items)


class Doubled(UserHoldout):
    def split(self, interactions):
        found = super().split(interactions)
        test = np.concatenate([found.test_rows, found.test_rows[:1]])
        object.__setattr__(found, "test_rows", test)
        return found


class Unsplit(UserHoldout):
    def split(self, interactions):
        users = np.unique(interactions.users)
        return Partition(users, np.arange(len(interactions)), np.empty(0), np.empty(0))


class Undrawn(RandomReplacement):
    def perturb(self, data):
        return RandomReplacement(self.config, counted()).perturb(data)


class InPlace(RandomReplacement):
    def perturb(self, data):
        data.rows.items.setflags(write=True)
        data.rows.items[0] += 1
        return super().perturb(data)


class Ordered(FixedSizeSampler):
    def sample(self, round_number):
        return np.sort(self.draw(np.random.default_rng(counted())))


class Marking(Callback):
    def after_round(self, row, seconds):
        row["loss"] = 0.0
        return False


class Counted(Rounding):
    def encode(self, change, random):
        sent = super().encode(change, random)
        return {**sent, "scales": sent["scales"] * counted()}


class Unsure(RandomProfiles):
    def profile(self, known, random):
        return super().profile(known, np.random.default_rng(counted()))


class Drifting(Gaussian):
    def draw(self, name, size, memory, source, *address):
        return super().draw(name, size, memory, source, *address) * counted()


class Cumulative(Popularity):
    def fit(self, histories):
        before = getattr(self, "_counts", 0)
        super().fit(histories)
        self._counts = self._counts + before


class Relative(Popularity):
    def scores(self, histories):
        return super().scores(histories) * histories.num_users


class Described(Popularity):
    def fit(self, histories):
        super().fit(histories)
        self.bonus = 0.0 if histories.item_features is None else 1.0

    def scores(self, histories):
        return super().scores(histories) + self.bonus


class Undescribed(PrivRec):
    @classmethod
    def features_used(cls, config, known):
        return FeatureNames()


class Renamed(Synthetic):
    def feature_names(self):
        return FeatureNames(("sex",), ("genres",))


class Guessing(Fit):
    def suspicion(self, attacked):
        return np.random.default_rng(counted()).random(len(attacked.users))


class Column(Fit):
    def suspicion(self, attacked):
        return super().suspicion(attacked)[:, None]


COHORT = {"cohort": 6}
FAULTS = [
    ("Baseline", Bare, {}, "test_every_setting_has_a_description"),
    ("Step", Remembering, {}, "test_an_update_is_a_function_of_the_random_stream"),
    ("Step", Deaf, {}, "test_an_update_is_a_function_of_the_random_stream"),
    ("Step", Idle, {}, "test_an_update_has_the_parameters_shapes_and_is_finite"),
    ("Step", Eager, {}, "test_no_epochs_change_nothing"),
    ("Step", Fragile, {}, "test_a_client_without_data_is_no_error"),
    ("Step", OtherwiseInBlocks, {}, "test_many_clients_at_once_equal_one_by_one"),
    ("Step", Crowded, {}, "test_the_sum_is_the_sum_of_the_clients"),
    ("Step", Unbounded, {}, "test_a_client_moves_the_private_sum_by_the_clip_norm_at_most"),
    ("Model", Mixing, {}, "test_predictions_have_the_cohorts_shape_and_its_members_do_not_mix"),
    ("Model", Unseeded, {}, "test_initial_parameters_are_a_function_of_the_generator"),
    ("Model", Reversed, {}, "test_scores_are_those_of_the_catalogue"),
    ("Model", Mixing, {}, "test_its_kernel_declaration_is_correct"),
    ("Model", Summed, {}, "test_the_loss_is_one_number_per_client_with_finite_gradients"),
    ("Strategy", Forgetting, {}, "test_a_run_is_a_function_of_its_seed"),
    ("Strategy", PerNode, {}, "test_the_distribution_over_nodes_makes_no_difference"),
    ("Strategy", Loose, {}, "test_privacy_is_bounded_or_refused"),
    ("Strategy", Unprotected, {}, "test_privacy_is_bounded_or_refused"),
    ("Strategy", Still, {}, "test_a_run_moves_finite_parameters_and_keeps_their_shapes"),
    ("Dataset", Restless, {}, "test_reading_twice_gives_the_same"),
    ("Dataset", Synthetic, {}, "test_missing_files_are_named"),
    ("Split", Doubled, {}, "test_parts_are_rows_of_the_data_and_some_are_held_out"),
    ("Split", Unsplit, {}, "test_it_is_a_function_of_the_seed"),
    ("Perturbation", Undrawn, {}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Perturbation", InPlace, {}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Sampler", Ordered, COHORT, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Callback", Marking, {}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Mechanism", Drifting, {}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Compression", Counted, {"bits": 8}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Poisoning", Unsure, {}, "test_it_is_a_function_of_its_seed_and_changes_no_input"),
    ("Baseline", Cumulative, {}, "test_fitting_twice_gives_the_same_scores"),
    ("Baseline", Relative, {}, "test_a_users_scores_do_not_depend_on_others"),
    ("Baseline", Described, {}, "test_it_uses_the_inputs_that_it_states"),
    ("Model", Undescribed, {}, "test_features_that_it_does_not_state_change_nothing"),
    ("Dataset", Renamed, {}, "test_feature_names_are_those_of_the_data"),
    ("Attack", Guessing, {}, "test_its_outcome_is_a_function_of_what_it_sees_and_the_seed"),
    ("Attack", Column, {}, "test_it_attacks_trained_systems"),
]


@pytest.mark.parametrize(
    ("kind", "component", "settings", "test"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_found(kind, component, settings, test, tmp_path):
    contract = type(
        "Broken",
        (getattr(testing, f"{kind}Contract"),),
        {"component": component, "settings": settings},
    )
    with pytest.raises((AssertionError, ValueError, ClientError, pytest.fail.Exception)):
        method = getattr(contract(), test)
        method(tmp_path) if "tmp_path" in inspect.signature(method).parameters else method()


class TestPrivateUserVectors(ModelContract):
    """Matrix factorization with private user vectors and biases."""

    component = Mf
    experiment = {  # noqa: RUF012
        "step": {"name": "sgd", "private-parameters": ["user.*"], "epochs": 2}
    }


def test_a_model_whose_private_parameters_differ_between_paths_fails(monkeypatch, tmp_path):
    """Blocks that lose a client's private state are detected."""
    from simulations.contracts import training as contract

    calls = iter((1.0, 1.0, 2.0))
    private = contract._private

    def other(node):
        factor = next(calls)
        return {name: factor * value for name, value in private(node).items()}

    monkeypatch.setattr(contract, "_private", other)
    with pytest.raises(AssertionError):
        TestPrivateUserVectors().test_many_clients_at_once_equal_one_by_one(tmp_path)


def test_contracts_without_assertions_are_refused():
    command = [sys.executable, "-O", "-c", "from fedrec.testing import StepContract"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "contract tests check nothing without assertions" in done.stderr
