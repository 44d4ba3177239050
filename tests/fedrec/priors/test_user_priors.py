# SPDX-License-Identifier: Apache-2.0
"""Priors of equation 11 against loops, their noise against their sensitivity, and the sources of
vectors."""

import itertools
import json
import math

import numpy as np
import pytest
import tomli_w
from scipy.stats import kstest
from typer.testing import CliRunner

from fedrec.data.client_data import ClientData
from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.errors import DataError, ExperimentError
from fedrec.models.vae import Vae, VaeConfig
from fedrec.priors.sources import read_glove, word_vectors
from fedrec.priors.user_level import UserPriors, user_priors
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.privacy.personal.priors import PriorsConfig
from simulations.cli import app

WORDS = (("F", "M"), ("artist", "doctor", "none"))
NONE = np.zeros(0, dtype=np.int64)


def client(*codes, number=0):
    features = tuple(np.atleast_1d(np.array(code)) for code in codes)
    return ClientData(number, features, NONE, np.zeros(0, np.float32), NONE)


def vae(latent=4, words=WORDS):
    users = tuple((f"kind{place}", len(own)) for place, own in enumerate(words))
    return Vae(
        VaeConfig(latent=latent), Schema(6, FeatureTable(6, ()), users, "ranking", user_words=words)
    )


def quiet(**settings):
    found = user_priors(PriorsConfig(noise=False, **settings), None, vae())
    assert found is not None
    return found


def test_equation_11_by_loops():
    priors = quiet()
    for gender, work in itertools.product(range(2), range(3)):
        mean, variance = priors.exact(client(gender, work))
        for j in range(4):
            m = [priors.vectors[0][gender][j], priors.vectors[1][work][j]]
            mu_w = [float(np.mean(own[:, j])) for own in priors.vectors]
            mu = m[0] * mu_w[0] + m[1] * mu_w[1]
            assert mean[j] == pytest.approx(mu, rel=1e-5)
            assert variance[j] == pytest.approx((m[0] - mu) ** 2 + (m[1] - mu) ** 2, rel=1e-5)


def test_several_words_are_their_mean_and_none_is_the_mean_of_all():
    priors = quiet()
    both, _ = priors.exact(client([0, 1], 2))
    one, other = (priors.exact(client(code, 2))[0] for code in (0, 1))
    np.testing.assert_allclose(both, (one + other) / 2)
    np.testing.assert_allclose(priors.exact(client(-1, 2))[0], both)


def test_no_exchange_of_metadata_moves_more_than_the_sensitivity():
    priors = quiet()
    found = [priors.exact(client(*codes)) for codes in itertools.product((-1, 0, 1), (-1, 0, 1, 2))]
    for which in range(2):
        widest = max(
            np.linalg.norm(a[which] - b[which]) for a, b in itertools.combinations(found, 2)
        )
        assert widest <= priors.sensitivities[which] + 1e-12


def test_noise_has_the_scale_of_the_budget_and_is_drawn_once_per_user():
    # many numbers, to estimate a distribution; mu_kj = 0.5
    table = [np.full((2, 3000), 0.5), np.full((3, 3000), 0.5)]
    config = PriorsConfig()
    settings = PersonalNoise(budgets="equal", epsilon=2.5e6, participations=3, priors=config)
    priors = UserPriors(table, [0, 1], config, settings)
    mean, _ = priors.of(client(0, 1, number=7))
    # mean and variance are one release, half of the cost each
    multiplier = settings.prior_multiplier(7) * math.sqrt(2)
    assert kstest(mean, "norm", (0.5, multiplier * priors.sensitivities[0])).pvalue > 1e-3
    assert kstest(mean, "norm", (0.5, 1.2 * multiplier * priors.sensitivities[0])).pvalue < 1e-3
    np.testing.assert_array_equal(mean, priors.of(client(0, 1, number=7))[0])
    assert not np.array_equal(mean, priors.of(client(0, 1, number=8))[0])


def test_priors_stay_in_their_range_under_any_noise():
    config = PriorsConfig()
    noise = PersonalNoise(epsilon=1e-3, participations=1, priors=config)
    priors = user_priors(config, noise, vae())
    for number in range(20):
        mean, variance = priors.of(client(0, 1, number=number))
        assert (mean >= 0).all()
        assert (mean <= priors.highest + 1e-6).all()
        assert (variance >= np.float32(0.05)).all()


def test_onehot_vectors_are_in_range_and_tell_words_apart():
    own = word_vectors(PriorsConfig(), WORDS, 4)
    rows = np.concatenate(own)
    assert [len(part) for part in own] == [2, 3] and rows.min() == 0 and rows.max() == 1
    assert len({tuple(row) for row in rows.tolist()}) == 5
    np.testing.assert_array_equal(own[1], word_vectors(PriorsConfig(), WORDS, 4)[1])


def test_as_many_numbers_as_words_are_onehot_itself():
    own = np.concatenate(word_vectors(PriorsConfig(), WORDS, 5))
    assert sorted(own.sum(1).tolist()) == [1] * 5 and sorted(own.sum(0).tolist()) == [1] * 5


@pytest.fixture
def glove(tmp_path):
    file = tmp_path / "glove.txt"
    file.write_text("the 9 9 9 9\nfemale 0 1 2 3\nmale 4 1 0 1\nartist 2 0 0 5\ndoctor 1 1 1 1\n")
    return file


def test_glove_is_looked_up_by_word_and_stretched_to_its_range(glove, caplog):
    gender, work = word_vectors(PriorsConfig(source=f"glove:{glove}"), WORDS, 4)
    raw = np.array([[0, 1, 2, 3], [4, 1, 0, 1], [2, 0, 0, 5], [1, 1, 1, 1]], dtype=float)
    mean = raw.mean(0)  # "none" is not in the file
    every = np.vstack([raw, mean])
    expected = (every - every.min(0)) / (every.max(0) - every.min(0))
    np.testing.assert_allclose(np.concatenate([gender, work]), expected)
    assert "none" in caplog.text and set(read_glove(glove, ["doctor"])) == {"doctor"}


def test_a_file_in_the_published_format_is_read_as_plain_python_reads_it(tmp_path):
    """50 numbers as `%.5g` writes them, tokens of punctuation and other alphabets, and a token with
    a blank."""
    random = np.random.default_rng(0)
    words = ["the", ",", ".", '"', "'s", "artist", "ß", "日本", "doctor", "male", "0.5"]
    table = {
        word: [float(f"{value:.5g}") for value in random.normal(scale=0.5, size=50)]
        for word in words
    }
    table["artist"][0] = -6.6023e-05
    lines = [" ".join([word, *(f"{value:.5g}" for value in own)]) for word, own in table.items()]
    lines.append(
        " ".join(["artist name@domain.com", *(f"{value:.5g}" for value in random.normal(size=50))])
    )
    file = tmp_path / "glove.6B.50d.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert "e-05" in file.read_text(encoding="utf-8")
    found = read_glove(file, ["artist", "doctor", "male", "absent"])
    assert {word: own.tolist() for word, own in found.items()} == {
        w: table[w] for w in ("artist", "doctor", "male")
    }
    (gender, work) = word_vectors(
        PriorsConfig(source=f"glove:{file}"), (("M",), ("artist", "doctor")), 20
    )
    assert (
        gender.shape == (1, 20) and work.shape == (2, 20) and gender.min() >= 0 and work.max() <= 1
    )


def test_a_table_gives_the_same_as_the_file_it_was_made_from(glove, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(
        json.dumps(
            {word: own.tolist() for word, own in read_glove(glove, WORDS[1] + ("male",)).items()}
        )
    )
    words = (("M",), WORDS[1])
    one = word_vectors(PriorsConfig(source=f"table:{table}"), words, 2)
    other = word_vectors(PriorsConfig(source=f"glove:{glove}"), words, 2)
    for own, same in zip(one, other, strict=True):
        np.testing.assert_array_equal(own, same)


def test_the_command_line_makes_such_a_table(glove, tmp_path, tiny_experiment):
    file, table = tmp_path / "tiny.toml", tmp_path / "table.json"
    file.write_text(tomli_w.dumps(tiny_experiment()))
    found = CliRunner().invoke(
        app, ["data", "glove-subset", str(glove), str(file), "--output", str(table)]
    )
    assert found.exit_code == 0, found.output
    assert json.loads(table.read_text()) == {"female": [0, 1, 2, 3], "male": [4, 1, 0, 1]}
    assert "without a vector" in found.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        ("{", "no table"),
        ("{}", "none of the words"),
        ('{"artist": ["x"]}', "no vector"),
    ],
)
def test_files_that_will_not_do(tmp_path, content, message):
    file = tmp_path / "table.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        word_vectors(PriorsConfig(source=f"table:{file}"), WORDS, 2)


def test_another_file_than_was_meant_is_refused(glove):
    with pytest.raises(DataError, match="another file"):
        word_vectors(PriorsConfig(source=f"glove:{glove}", sha256="0" * 64), WORDS, 2)


def test_users_without_such_metadata_are_refused():
    with pytest.raises(ExperimentError, match="no such features"):
        user_priors(PriorsConfig(features=("hobby",)), None, vae())
    with pytest.raises(ExperimentError, match="no such features"):
        user_priors(PriorsConfig(), None, vae(words=()))
