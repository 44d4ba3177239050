# SPDX-License-Identifier: Apache-2.0
"""Public embeddings are factors of their documented kernel."""

import numpy as np
import pytest

from fedrec.data.features import Feature, FeatureTable, Vectors
from fedrec.errors import ExperimentError
from fedrec.factors.public import PublicPriorConfig, feature_embeddings

TAGS = [["x"], ["x", "y"], ["y", "z"], [], ["z"]]
ERAS = [["1"], ["1", "2"], ["3"], ["4"], ["2", "3"]]


def embeddings(features, ordered, variance=0.0, ordered_variance=0.0, interaction_variance=0.0):
    """Settings with all effects zero, unless given."""
    prior = PublicPriorConfig(
        ordered=ordered,
        feature_variance=variance,
        ordered_variance=ordered_variance,
        interaction_variance=interaction_variance,
    )
    return feature_embeddings(features, prior)


@pytest.fixture(scope="module")
def features():
    return FeatureTable(5, (Feature.multiple("tags", TAGS), Feature.multiple("eras", ERAS)))


def kernel(features, **variances):
    found = embeddings(features, {"eras": 1.5}, **variances)
    return found @ found.T


def by_hand(length_scale):
    def covariance(one, other):
        return np.mean(
            [[np.exp(-((int(a) - int(b)) ** 2) / 2 / length_scale**2) for b in other] for a in one]
        )

    return np.array([[covariance(one, other) for other in ERAS] for one in ERAS])


def test_categories_count_common_ones(features):
    common = [[len(set(one) & set(other)) for other in TAGS] for one in TAGS]
    np.testing.assert_allclose(kernel(features, variance=0.7), 0.7 * np.array(common), atol=1e-12)


def test_neighbouring_ordered_categories_are_alike(features):
    np.testing.assert_allclose(
        kernel(features, ordered_variance=2.0), 2.0 * by_hand(1.5), atol=1e-5
    )


def test_interactions_are_products(features):
    unit = [max(len(one), 1) ** 0.5 for one in TAGS]
    cosines = [
        [len(set(one) & set(other)) / a / b for other, b in zip(TAGS, unit, strict=True)]
        for one, a in zip(TAGS, unit, strict=True)
    ]
    expected = 0.4 * np.array(cosines) * by_hand(0.75)
    found = kernel(features, interaction_variance=0.4)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_words_that_some_items_share_count():
    titles = ["The Toy Story", "Toy Story II", "Toy Box", "the box", "the end"]
    table = FeatureTable(5, texts=(Feature.words("title", titles),))
    prior = PublicPriorConfig(word_variance=0.6, word_items=(2, 3))
    found = feature_embeddings(table, prior)
    counted = [{"the", "toy", "story"}, {"toy", "story"}, {"toy", "box"}, {"the", "box"}, {"the"}]
    common = [[len(one & other) for other in counted] for one in counted]
    np.testing.assert_allclose(found @ found.T, 0.6 * np.array(common), atol=1e-12)
    fewer = feature_embeddings(table, prior.model_copy(update={"word_items": (2, 2)}))
    assert fewer.shape == (5, 2), "of story and box; ii and end are of one item"


def test_vectors_have_a_linear_kernel():
    """Less their mean, of mean squared length 1; an item without one is where the mean is."""
    values = np.array([[1.0, 2], [3, -4], [0, 0], [5, 5], [2, 0]], dtype=np.float32)
    known = np.array([True, True, False, True, True])
    table = FeatureTable(5, vectors=(Vectors("cover", values, known),))
    found = feature_embeddings(table, PublicPriorConfig(vector_variance=0.4))
    own = values[known] - values[known].mean(0)
    expected = np.zeros((5, 5))
    expected[np.ix_(known, known)] = 0.4 * own @ own.T / np.mean([row @ row for row in own])
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-6)


def test_without_features_there_is_no_coordinate():
    assert embeddings(FeatureTable(7), {}).shape == (7, 0)


def test_an_unknown_feature_is_named(features):
    with pytest.raises(ExperimentError, match=r"(?s)no feature years.*eras, tags"):
        embeddings(features, {"years": 1.0})
