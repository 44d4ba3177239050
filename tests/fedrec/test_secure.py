# SPDX-License-Identifier: Apache-2.0
"""Secure sums: fixed point, masks, shares and settings."""

from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.schema import SecureAggregationConfig, load
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import TrainSum
from fedrec.protocol.secure import SEALED_BYTES
from fedrec.protocol.updates import SparseUpdate
from fedrec.secure import keys, vector
from fedrec.secure.vector import _SentShape, bits_for, from_fixed_point, limit, to_fixed_point

# A node's reply as one vector of integers, and the sum of several vectors as a reply.


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
    return TrainSum(total, number, 2.0 * number, 10 * number, 0.25 * number, number)


def test_the_sum_of_vectors_is_the_sum_of_answers(theta):
    shapes = vector.shapes_of(theta, None)
    answers = [answer(theta, number) for number in (1, 2, 3)]
    encoded = [vector.encoded(one, theta, shapes, 30, 3) for one in answers]
    assert {len(one) for one in encoded} == {vector.length(shapes)} == {6 + 1 + 5}
    found = vector.decoded(np.sum(encoded, axis=0, dtype=np.uint64), shapes, 30)
    for name, value in theta.items():
        expected = sum(one.total[name] for one in answers)
        assert found.total[name].shape == value.shape
        np.testing.assert_allclose(found.total[name], expected, rtol=0, atol=1.5 * 2**-30)
    counts = {"clients": 6, "weight": 12.0, "examples": 60, "loss": 1.5, "losses": 6}
    assert {name: getattr(found, name) for name in counts} == counts


def test_a_table_of_few_rows_is_sent_whole(theta):
    shapes = vector.shapes_of({"w": theta["w"]}, None)
    rows = SparseUpdate((2, 3), np.array([1]), np.ones((1, 3)))
    found = vector.decoded(
        vector.encoded(TrainSum({"w": rows}, 1, 1.0, 1, 0.0, 0), theta, shapes, 40, 1), shapes, 40
    )
    np.testing.assert_allclose(found.total["w"], [[0] * 3, [1] * 3], atol=2**-40)


def test_of_a_symmetric_parameter_one_half_is_sent():
    theta = {"p": np.zeros((4, 4), np.float32), "w": np.zeros((2, 3), np.float32)}
    shapes = vector.shapes_of(theta, None, symmetric=("p", "other"))
    assert [one.symmetric for one in shapes.values()] == [True, False]
    assert vector.length(shapes) == 10 + 6 + 5
    assert vector.vector_bytes(shapes) == 8 * (10 + 6 + 5)
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=(2, 4, 4))
    totals = [{"p": one + one.T, "w": generator.normal(size=(2, 3))} for one in drawn]
    sent = [
        vector.encoded(TrainSum(one, 1, 1.0, 1, 0.0, 0), theta, shapes, 40, 2) for one in totals
    ]
    found = vector.decoded(sent[0] + sent[1], shapes, 40).total
    for name in theta:
        expected = totals[0][name] + totals[1][name]
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=2**-40)


def test_only_protected_parameters_are_sent(theta):
    assert vector.shapes_of(theta, Protection(1.0, 2, ("w",))) == {"w": _SentShape((2, 3))}
    assert list(vector.shapes_of(dict(reversed(theta.items())), None)) == ["b", "e", "w"]


@pytest.mark.parametrize(
    ("protection", "bound"),
    [
        (None, 123.0),
        (Protection(0.5, 2, ("w",)), 16 * 0.5),
        (Protection(0.5, 2, ("w",), noise_scale=2.0), 16 * 0.5 + 64 * 5 * 2),
    ],
)
def test_the_digits_follow_from_clip_norm_and_noise(protection, bound):
    assert vector.session_bits(protection, 16, 3, 123.0) == bits_for(bound, 3)


@pytest.mark.parametrize("where", ["w", "loss"])
def test_too_large_is_refused(theta, where):
    found = answer(theta, 2)
    if where == "w":
        found.total["w"][1, 2] = 1e12
    else:
        found = TrainSum(found.total, 1, 1.0, 1, 1e14, 1)
    with pytest.raises(ClientError, match="too large"):
        vector.encoded(found, theta, vector.shapes_of(theta, None), 30, 3)


# Fixed point: sums are exact to the step, nothing wraps around, and numbers that are too large are
# refused.

SURE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FINITE = st.floats(-1000, 1000)


@pytest.mark.parametrize(
    ("value", "bits", "expected"),
    [
        (0.0, 8, 0),
        (1.0, 8, 256),
        (-1.0, 8, 2**64 - 256),
        (0.5, 0, 0),
        (1.5, 0, 2),
        (-2.75, 1, 2**64 - 6),
    ],
)
def test_by_hand(value, bits, expected):
    """Ties go to the even integer."""
    assert to_fixed_point(np.array([value]), bits, 2).tolist() == [expected]


@SURE
@given(
    st.lists(st.lists(FINITE, min_size=4, max_size=4), min_size=1, max_size=6), st.integers(0, 40)
)
def test_a_sum_is_the_exact_sum_within_half_a_step_per_node(rows, bits):
    total = sum(
        (to_fixed_point(np.array(row), bits, len(rows)) for row in rows),
        np.zeros(4, dtype=np.uint64),
    )
    for place, found in enumerate(from_fixed_point(total, bits)):
        exact = sum(Fraction(row[place]) for row in rows)
        assert (
            abs(Fraction(float(found)) - exact)
            <= Fraction(len(rows), 2 ** (bits + 1)) + abs(exact) / 2**52
        )


@SURE
@given(st.integers(1, 200), st.floats(1e-9, 1e9))
@example(1, 1.0)
@example(2, 1.0)
@example(4, 0.25)
def test_as_many_digits_as_there_is_room_for(nodes, bound):
    bits = bits_for(bound, nodes)
    assert Fraction(bound) * 2**bits <= limit(nodes) and nodes * limit(nodes) < 2**63
    assert bits == 100 or Fraction(bound) * 2 ** (bits + 1) > limit(nodes)
    most = np.full(1, bound)
    for sign in (1, -1):
        total = nodes * int(to_fixed_point(sign * most, bits, nodes).view(np.int64)[0])
        assert -(2**63) <= total < 2**63


BEYOND = limit(3) / 2**20 * (1 + 1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, BEYOND, -BEYOND])
def test_invalid_numbers_are_refused_and_not_shown(value):
    with pytest.raises(ClientError) as refused:
        to_fixed_point(np.array([0.0, value]), 20, 3)
    assert str(value) not in str(refused.value).replace("finite", "")


@pytest.mark.parametrize("bound", [0.0, -1.0, np.inf, 1e19])
def test_a_bound_without_room_is_refused(bound):
    with pytest.raises(ExperimentError, match="invalid bound"):
        bits_for(bound, 4)


# Masks: they cancel, they look random, and two nodes agree on theirs in secret.

SESSION = bytes(range(16))


def seed(number):
    return number.to_bytes(16, "little")


def parts(nodes, length=5):
    """Mask seeds, public keys, self-mask seeds and numbers of some nodes, by place."""
    mask_seeds = {place: seed(100 + place) for place in range(nodes)}
    public = {place: keys.public_of(keys.key_of(mask_seeds[place])) for place in range(nodes)}
    selves = {place: seed(200 + place) for place in range(nodes)}
    generator = np.random.default_rng(nodes)
    numbers = {
        place: generator.integers(0, 2**64, length, dtype=np.uint64) for place in range(nodes)
    }
    return mask_seeds, public, selves, numbers


def masked_by(place, mask_seeds, public, selves, numbers):
    pairs = keys.pairwise_mask(
        keys.key_of(mask_seeds[place]),
        place,
        keys.without(public, place),
        SESSION,
        len(numbers[place]),
    )
    return numbers[place] + keys.own_mask(selves[place], len(numbers[place])) + pairs


@settings(
    deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.integers(2, 6), st.data())
def test_the_sum_of_any_survivors_comes_back(nodes, data):
    mask_seeds, public, selves, numbers = parts(nodes)
    survivors = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
    masked = {place: masked_by(place, mask_seeds, public, selves, numbers) for place in survivors}
    dropped = {place: mask_seeds[place] for place in range(nodes) if place not in survivors}
    found = keys.unmasked(masked, {p: selves[p] for p in survivors}, dropped, public, SESSION)
    expected = np.sum([numbers[place] for place in survivors], axis=0, dtype=np.uint64)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("without", ["pairs", "self"])
def test_one_kind_of_mask_alone_hides(without):
    """All ones under a mask look like even bytes: chi-square of 256 values, of a fixed seed, on
    both sides."""
    mask_seeds, public, selves, _ = parts(3)
    length = 20_000
    ones = np.ones(length, dtype=np.uint64)
    if without == "pairs":
        hidden = ones + keys.own_mask(selves[0], length)
    else:
        pairs = keys.pairwise_mask(
            keys.key_of(mask_seeds[0]), 0, keys.without(public, 0), SESSION, length
        )
        hidden = ones + pairs
    counts = np.bincount(hidden.view(np.uint8), minlength=256)
    expected = 8 * length / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.ppf(1e-4, 255) < statistic < chi2.ppf(1 - 1e-4, 255)


def test_the_same_numbers_masked_in_two_sessions_have_nothing_in_common():
    mask_seeds, public, selves, numbers = parts(3, length=1000)
    one = masked_by(1, mask_seeds, public, selves, numbers)
    again = numbers[1] + keys.pairwise_mask(
        keys.key_of(mask_seeds[1]), 1, keys.without(public, 1), bytes(16), 1000
    )
    other = masked_by(1, mask_seeds, public, {**selves, 1: seed(7)}, numbers)
    for two in (again, other):
        assert (one != two).all()
        assert len(np.unique((one - two) & np.uint64(255))) > 200


def test_secrets_for_different_purposes_differ():
    secret = seed(5)
    made = {keys.derived(secret, purpose) for purpose in (b"mask key", b"self mask", b"pair mask")}
    assert len({*made, secret, keys.commitment_of(secret)}) == 5
    assert keys.fresh_seed() != keys.fresh_seed()


def test_the_keystream_is_chacha20():
    """RFC 8439, appendix A.1, test vector 1: key and nonce zero, counter 0."""
    first = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert keys._keystream(bytes(32), 4).astype("<u8").tobytes().hex() == first
    assert np.array_equal(keys._keystream(bytes(32), 2), keys._keystream(bytes(32), 4)[:2])


@pytest.mark.parametrize("key", [bytes(32), bytes(31), b""])
def test_a_key_that_is_none_is_refused(key):
    """All zeros is a point of small order: its sender would know the agreed secret."""
    with pytest.raises(ValueError):
        keys.agreed(X25519PrivateKey.generate(), key, b"x")


# The settings of secure aggregation, and the number of nodes that a sum needs.


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"treshold": 0.7}, "'secure-aggregation.treshold'(.*\n)*.*did you mean 'threshold'"),
        ({"threshold": 0.5}, "secure-aggregation.threshold"),
        ({"threshold": 1.1}, "secure-aggregation.threshold"),
        ({"least-nodes": 1}, "secure-aggregation.least-nodes"),
        ({"largest": 0.0}, "secure-aggregation.largest"),
        ("yes", "secure-aggregation"),
    ],
)
def test_wrong_settings_are_named(tiny_experiment, given_, told):
    with pytest.raises(ExperimentError, match=told):
        load({**tiny_experiment(), "secure-aggregation": given_})


def test_two_thirds_rounded_up_and_never_half():
    settings = SecureAggregationConfig()
    quorums = {1: 2, 2: 2, 3: 2, 4: 3, 5: 4, 6: 4, 8: 6, 9: 6, 100: 67}
    assert {nodes: settings.quorum(nodes) for nodes in quorums} == quorums
    assert SecureAggregationConfig(least_nodes=5).quorum(3) == 5
    assert SecureAggregationConfig(threshold=1).quorum(7) == 7


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(2, 1000), st.floats(0.5, 1, exclude_min=True))
def test_two_quorums_always_meet(nodes, share):
    quorum = SecureAggregationConfig(threshold=share).quorum(nodes)
    assert 2 * quorum > nodes and quorum <= nodes and quorum > share * nodes - 1e-9


# Shares: any quorum reconstructs the secret, fewer do not, and only the recipient can read a share.

SECRET = b"sixteen bytes ab"


@settings(
    deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.binary(min_size=16, max_size=16), st.integers(2, 7), st.data())
def test_any_quorum_of_any_size(secret, nodes, data):
    quorum = data.draw(st.integers(2, nodes))
    chosen = data.draw(st.sets(st.integers(0, nodes - 1), min_size=quorum))
    dealt = keys.split(secret, quorum, nodes)
    assert keys.combined({place: dealt[place] for place in chosen}, quorum) == secret


def test_fewer_are_refused_and_reveal_nothing():
    """With one share too few, every secret is possible: each is consistent with some last share."""
    dealt = keys.split(SECRET, 3, 5)
    with pytest.raises(ValueError, match="at least 3 shares, got 2"):
        keys.combined({0: dealt[0], 4: dealt[4]}, 3)
    guesses = {keys.combined({0: dealt[0], 4: dealt[4], 2: bytes([n]) * 16}, 3) for n in range(50)}
    assert len(guesses) == 50 and SECRET not in guesses
    assert SECRET not in dealt and len(set(dealt)) == 5
    assert keys.split(SECRET, 3, 5) != dealt


@pytest.mark.parametrize(("quorum", "nodes"), [(1, 3), (4, 3), (0, 0)])
def test_a_quorum_that_cannot_be_is_refused(quorum, nodes):
    with pytest.raises(ValueError, match="quorum"):
        keys.split(SECRET, quorum, nodes)


@pytest.fixture(scope="module")
def sent():
    """Two private keys, and the message from the first one's owner to the second's."""
    sender, receiver = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    pair, mask_key = (bytes(range(16)), bytes(range(16, 32))), bytes(range(32))
    return (
        sender,
        receiver,
        pair,
        mask_key,
        keys.sealed(sender, keys.public_of(receiver), b"r", pair, mask_key),
    )


def test_the_receiver_reads_what_was_sent(sent):
    sender, receiver, pair, mask_key, message = sent
    assert keys.opened(receiver, keys.public_of(sender), b"r", message, mask_key) == pair
    assert len(message) == SEALED_BYTES and pair[0] not in message and pair[1] not in message


def test_nobody_else_does_and_nothing_can_be_exchanged(sent):
    sender, receiver, _, mask_key, message = sent
    stranger, public = X25519PrivateKey.generate(), keys.public_of(sender)
    forged = bytes([message[0] ^ 1]) + message[1:]
    for key, origin, route, text in (
        (stranger, public, b"r", message),
        (receiver, keys.public_of(stranger), b"r", message),
        (receiver, public, b"another session", message),
        (receiver, public, b"r", forged),
    ):
        with pytest.raises(ValueError, match="not from its stated sender"):
            keys.opened(key, origin, route, text, mask_key)
    with pytest.raises(ValueError, match="mask key differs"):
        keys.opened(receiver, public, b"r", message, bytes(32))
