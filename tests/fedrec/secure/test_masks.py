# SPDX-License-Identifier: Apache-2.0
"""Masks: they cancel, they look random, and two nodes agree on theirs in secret."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedrec.secure import masks

SESSION = bytes(range(16))


def seed(number):
    return number.to_bytes(16, "little")


def parts(nodes, length=5):
    """Mask seeds, public keys, self-mask seeds and numbers of some nodes, by place."""
    mask_seeds = {place: seed(100 + place) for place in range(nodes)}
    public = {place: masks.public_of(masks.key_of(mask_seeds[place])) for place in range(nodes)}
    selves = {place: seed(200 + place) for place in range(nodes)}
    generator = np.random.default_rng(nodes)
    numbers = {
        place: generator.integers(0, 2**64, length, dtype=np.uint64) for place in range(nodes)
    }
    return mask_seeds, public, selves, numbers


def masked_by(place, mask_seeds, public, selves, numbers):
    pairs = masks.pairwise_mask(
        masks.key_of(mask_seeds[place]),
        place,
        masks.without(public, place),
        SESSION,
        len(numbers[place]),
    )
    return numbers[place] + masks.own_mask(selves[place], len(numbers[place])) + pairs


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_pairwise_masks_cancel_in_the_sum_of_all(nodes):
    mask_seeds, public, _, _ = parts(nodes)
    found = [
        masks.pairwise_mask(
            masks.key_of(mask_seeds[place]), place, masks.without(public, place), SESSION, 50
        )
        for place in range(nodes)
    ]
    assert not np.sum(found, axis=0, dtype=np.uint64).any()
    assert all(one.any() for one in found)


@settings(
    deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.integers(2, 6), st.data())
def test_the_sum_of_any_survivors_comes_back(nodes, data):
    mask_seeds, public, selves, numbers = parts(nodes)
    survivors = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
    masked = {place: masked_by(place, mask_seeds, public, selves, numbers) for place in survivors}
    dropped = {place: mask_seeds[place] for place in range(nodes) if place not in survivors}
    found = masks.unmasked(masked, {p: selves[p] for p in survivors}, dropped, public, SESSION)
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
        hidden = ones + masks.own_mask(selves[0], length)
    else:
        pairs = masks.pairwise_mask(
            masks.key_of(mask_seeds[0]), 0, masks.without(public, 0), SESSION, length
        )
        hidden = ones + pairs
    counts = np.bincount(hidden.view(np.uint8), minlength=256)
    expected = 8 * length / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.ppf(1e-4, 255) < statistic < chi2.ppf(1 - 1e-4, 255)


def test_the_same_numbers_masked_in_two_sessions_have_nothing_in_common():
    mask_seeds, public, selves, numbers = parts(3, length=1000)
    one = masked_by(1, mask_seeds, public, selves, numbers)
    again = numbers[1] + masks.pairwise_mask(
        masks.key_of(mask_seeds[1]), 1, masks.without(public, 1), bytes(16), 1000
    )
    other = masked_by(1, mask_seeds, public, {**selves, 1: seed(7)}, numbers)
    for two in (again, other):
        assert (one != two).all()
        assert len(np.unique((one - two) & np.uint64(255))) > 200


def test_secrets_for_different_purposes_differ():
    secret = seed(5)
    made = {masks.derived(secret, purpose) for purpose in (b"mask key", b"self mask", b"pair mask")}
    assert len({*made, secret, masks.commitment_of(secret)}) == 5
    assert masks.fresh_seed() != masks.fresh_seed()


def test_the_keystream_is_chacha20():
    """RFC 8439, appendix A.1, test vector 1: key and nonce zero, counter 0."""
    first = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert masks.keystream(bytes(32), 4).astype("<u8").tobytes().hex() == first
    assert np.array_equal(masks.keystream(bytes(32), 2), masks.keystream(bytes(32), 4)[:2])


def test_two_nodes_agree_and_a_third_does_not():
    one, two, three = (X25519PrivateKey.generate() for _ in range(3))
    agreed = masks.agreed(one, masks.public_of(two), b"x")
    assert agreed == masks.agreed(two, masks.public_of(one), b"x") and len(agreed) == 32
    assert agreed != masks.agreed(three, masks.public_of(one), b"x")
    assert agreed != masks.agreed(one, masks.public_of(two), b"y")


@pytest.mark.parametrize("key", [bytes(32), bytes(31), b""])
def test_a_key_that_is_none_is_refused(key):
    """All zeros is a point of small order: its sender would know the agreed secret."""
    with pytest.raises(ValueError):
        masks.agreed(X25519PrivateKey.generate(), key, b"x")
