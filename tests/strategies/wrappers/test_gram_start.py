# SPDX-License-Identifier: Apache-2.0
"""Item factors from the sum of the clients' products, and alternating least squares from there."""

import json

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fedrec.baselines.factorisation.ials import CentralIalsConfig, solved
from fedrec.data.features import FeatureTable
from fedrec.data.population import Population
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.models.ials import Ials
from fedrec.models.ials import IalsConfig as ModelConfig

SYSTEM = (
    "model={name='ials', factors=5, moments=true, products=true}",
    "step={name='als', weight=4.0, regularisation=2.0}",
    "strategy={name='gram-start', main={name='fed-als', weight=4.0, regularisation=2.0}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=1}",
)
PRIVATE = (
    "privacy={epsilon=4.0, delta=1e-5, clip-norm=1.0,"
    " parameters=['user.gram', 'item.right', 'item.moments'],"
    " phases={products={clip-norm=6.0, parameters=['item.products'], noise-factor=0.5}}}"
)


def likes(result):
    population = Population.of(result.experiment)
    return population.histories(population.training_clients).astype(np.float64)


def test_factors_are_the_best_approximation_of_the_clients_histories(run_tiny):
    """Y Y^T = V s V^T of the five largest singular values of the interactions."""
    result = run_tiny(*SYSTEM, "rounds=1")
    _, values, right = np.linalg.svd(likes(result), full_matrices=False)
    found = result.parameters["item.factors"].astype(np.float64)
    np.testing.assert_allclose(found @ found.T, (right[:5].T * values[:5]) @ right[:5], atol=1e-5)
    np.testing.assert_allclose(result.parameters["item.gram"], found.T @ found, atol=1e-5)
    assert not result.parameters["item.products"].any()


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_the_next_round_is_a_sweep_from_there(run_tiny, path):
    start = run_tiny(*SYSTEM, "rounds=1", output="start")
    result = run_tiny(*SYSTEM, "rounds=2", f"engine.path={path}", output="run")
    rows = csr_array(likes(result))
    config = CentralIalsConfig(factors=5, weight=4.0, regularisation=2.0)
    items = torch.from_numpy(start.parameters["item.factors"].astype(np.float64))
    users = solved(rows, items, config)
    expected = solved(rows.T.tocsr(), users, config)
    np.testing.assert_allclose(result.parameters["item.factors"], expected.numpy(), atol=1e-5)


def test_under_noise_factors_below_the_edge_start_from_random_numbers(run_tiny):
    """With 18 users nothing is above it; both releases are charged to one ledger."""
    drawn = run_tiny(*SYSTEM, PRIVATE, "rounds=1", output="one").parameters["item.factors"]
    start = Ials(ModelConfig(factors=5), Schema(30, FeatureTable(30), (), "ranking")).initial(
        torch.Generator()
    )
    assert drawn.std() == pytest.approx(float(start["item.factors"].std()), rel=0.3)
    result = run_tiny(*SYSTEM, PRIVATE, "rounds=2", output="two")
    lines = (result.folder / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"]["phase"] for line in lines] == ["products", "main"]
    assert 3.9 < result.rounds["epsilon"].iloc[-1] <= 4.0


def test_a_model_without_products_is_refused(run_tiny):
    with pytest.raises(ExperimentError, match="no products of items"):
        run_tiny(*SYSTEM, "model.products=false")


def test_a_large_catalogue_is_refused():
    schema = Schema(20_001, FeatureTable(20_001), (), "ranking")
    with pytest.raises(ExperimentError, match="too large for products"):
        Ials(ModelConfig(products=True), schema)
