# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization: predictions equal the sum of their terms."""

import numpy as np
import pytest
import torch

from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.mf import Mf, MfConfig
from fedrec.rng import torch_stream


def test_a_prediction_is_biases_and_a_product():
    model = Mf(MfConfig(factors=3, center=3.5), Schema(5, FeatureTable(5, ()), (), "rating"))
    fresh = model.initial(torch_stream(1, "init"))
    assert fresh["bias"].tolist() == [3.5]
    assert not fresh["item.bias"].any()
    assert not fresh["user.bias"].any()
    random = np.random.default_rng(0)
    own = {n: random.normal(size=(2, *v.shape)).astype(np.float32) for n, v in fresh.items()}
    items = np.array([[4, 0, 4], [1, 2, 3]])
    got = model.predict(
        {n: torch.from_numpy(v) for n, v in own.items()}, (), torch.from_numpy(items)
    )
    for c in range(2):
        p = {name: value[c].astype(np.float64) for name, value in own.items()}
        expected = [
            p["bias"][0]
            + p["user.bias"][0]
            + p["item.bias"][i, 0]
            + p["item.factors"][i] @ p["user.factors"]
            for i in items[c]
        ]
        np.testing.assert_allclose(got[c].numpy(), expected, rtol=1e-5)
    scores = model.scores({n: torch.from_numpy(v) for n, v in own.items()}, ())
    torch.testing.assert_close(scores[0, [4, 0, 4]], got[0])
    given = {n: torch.from_numpy(v) for n, v in own.items()}
    for name in ("item.factors", "item.bias"):  # shared, as among clients with private factors
        given[name] = given[name][:1].expand(2, *given[name].shape[1:])
    wanted = model.predict(given, (), torch.arange(5).expand(2, -1))
    torch.testing.assert_close(model.scores(given, ()), wanted)


def test_without_biases_a_prediction_is_the_product_alone():
    model = Mf(MfConfig(factors=3, biases=False), Schema(5, FeatureTable(5, ()), (), "ranking"))
    fresh = model.initial(torch_stream(1, "init"))
    assert sorted(fresh) == ["item.factors", "user.factors"] and model.item_tables == (
        "item.factors",
    )
    assert Mf.item_tables == ("item.factors", "item.bias")
    scores = model.scores({name: value.unsqueeze(0) for name, value in fresh.items()}, ())
    np.testing.assert_allclose(
        scores[0].numpy(), fresh["item.factors"].numpy() @ fresh["user.factors"].numpy(), 1e-5
    )
    with pytest.raises(ValueError, match="biases = true"):
        MfConfig(biases=False, center=3.5)
