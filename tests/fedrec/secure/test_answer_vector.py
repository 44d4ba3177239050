# SPDX-License-Identifier: Apache-2.0
"""A node's reply as one vector of integers, and the sum of several vectors as a reply."""

import numpy as np
import pytest

from fedrec.errors import ClientError
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.sparse_update import SparseUpdate
from fedrec.secure import vector
from fedrec.secure.vector import Form, SentShape


@pytest.fixture
def theta():
    generator = np.random.default_rng(3)
    return {
        "w": generator.normal(size=(2, 3)).astype(np.float32),
        "b": np.array(0.5, np.float32),
        "e": np.zeros((0, 4)),
    }


def answer(theta, number):
    generator = np.random.default_rng(number)
    total = {name: generator.normal(size=value.shape) for name, value in theta.items()}
    return TrainSum(total, number, 2.0 * number, 10 * number, 0.25 * number, number, number - 1)


def test_the_sum_of_vectors_is_the_sum_of_answers(theta):
    shapes = vector.shapes_of(theta, None)
    answers = [answer(theta, number) for number in (1, 2, 3)]
    encoded = [vector.encoded(one, theta, shapes, Form(30), 3) for one in answers]
    assert {len(one) for one in encoded} == {vector.length(shapes)} == {6 + 1 + 6}
    found = vector.decoded(np.sum(encoded, axis=0, dtype=np.uint64), shapes, Form(30))
    for name, value in theta.items():
        expected = sum(one.total[name] for one in answers)
        assert found.total[name].shape == value.shape
        np.testing.assert_allclose(found.total[name], expected, rtol=0, atol=1.5 * 2**-30)
    counted = (
        found.clients,
        found.weight,
        found.examples,
        found.loss,
        found.losses,
        found.unclipped,
    )
    assert counted == (6, 12.0, 60, 1.5, 6, 3)


def test_a_table_of_few_rows_is_sent_whole(theta):
    shapes = vector.shapes_of({"w": theta["w"]}, None)
    rows = SparseUpdate((2, 3), np.array([1]), np.ones((1, 3)), drift=-0.5)
    found = vector.decoded(
        vector.encoded(TrainSum({"w": rows}, 1, 1.0, 1, 0.0, 0), theta, shapes, Form(40), 1),
        shapes,
        Form(40),
    )
    np.testing.assert_allclose(
        found.total["w"], -0.5 * theta["w"].astype(float) + [[0] * 3, [1] * 3], atol=2**-40
    )


def test_of_a_symmetric_parameter_one_half_is_sent():
    theta = {"p": np.zeros((4, 4), np.float32), "w": np.zeros((2, 3), np.float32)}
    shapes = vector.shapes_of(theta, None, symmetric=("p", "other"))
    assert [one.symmetric for one in shapes.values()] == [True, False]
    assert vector.length(shapes) == 10 + 6 + 6
    assert vector.vector_bytes(shapes, np.dtype("u4")) == 4 * (10 + 6) + 8 * 6
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=(2, 4, 4))
    totals = [{"p": one + one.T, "w": generator.normal(size=(2, 3))} for one in drawn]
    sent = [
        vector.encoded(TrainSum(one, 1, 1.0, 1, 0.0, 0), theta, shapes, Form(40), 2)
        for one in totals
    ]
    found = vector.decoded(sent[0] + sent[1], shapes, Form(40)).total
    for name in theta:
        expected = totals[0][name] + totals[1][name]
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=2**-40)


def test_only_protected_parameters_are_sent(theta):
    assert vector.shapes_of(theta, Protection(1.0, 2, ("w",))) == {"w": SentShape((2, 3))}
    assert list(vector.shapes_of(dict(reversed(theta.items())), None)) == ["b", "e", "w"]


def test_the_bound_follows_from_clip_norm_and_noise():
    assert vector.bound_of(None, 9, 123.0) == 123.0
    assert vector.bound_of(Protection(0.5, 2, ("w",)), 16, 123.0) == 8.0
    assert (
        vector.bound_of(Protection(0.5, 2, ("w",), noise_scale=2.0), 16, 123.0) == 8.0 + 64 * 5 * 2
    )


@pytest.mark.parametrize("where", ["w", "loss"])
def test_too_large_is_refused(theta, where):
    found = answer(theta, 2)
    if where == "w":
        found.total["w"][1, 2] = 1e12
    else:
        found = TrainSum(found.total, 1, 1.0, 1, 1e14, 1)
    with pytest.raises(ClientError, match="too large"):
        vector.encoded(found, theta, vector.shapes_of(theta, None), Form(30), 3)
