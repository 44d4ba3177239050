# SPDX-License-Identifier: Apache-2.0
"""Users' priors from the words of their metadata, by word vectors from three sources.

Word vectors from three sources, transformed to K numbers in [0, 1].

Vectors of another length are multiplied by a fixed matrix with orthonormal rows or columns, drawn
from a seed, and then each of the K numbers is rescaled to [0, 1] over the required words: equation
11 assumes that range, which GloVe vectors do not have. Words and their vectors are public.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedrec.data.client_data import ClientData
from fedrec.errors import DataError
from fedrec.models.vae import Vae
from fedrec.privacy.personal import PersonalNoise, PriorsConfig
from fedrec.rng import stream
from fedrec.runtime.files import read_json

log = logging.getLogger("fedrec")


def _word_vectors(
    config: PriorsConfig, words: Sequence[Sequence[str]], numbers: int
) -> list[np.ndarray]:
    """Look up the word vectors of each kind of metadata, `float64 [words, numbers]`, in [0, 1].

    Args:
        config: the source.
        words: the labels of each kind.
        numbers: K.

    Raises:
        DataError: a file is missing, does not have the digest `sha256`, is not in its format, or
            has none of the words.
    """
    looked_up = [[config.words.get(label, label).lower() for label in kind] for kind in words]
    distinct = sorted({word for kind in looked_up for word in kind})
    if config.source == "onehot":
        vectors = dict(zip(distinct, np.eye(len(distinct)), strict=True))
    else:
        vectors = _read(config, distinct)
    missing = [word for word in distinct if word not in vectors]
    if missing:
        log.warning(
            "no vector for %d words; using the mean of the others: %s",
            len(missing),
            ", ".join(missing),
        )
    mean = np.mean([vectors[word] for word in sorted(vectors)], axis=0)
    table = np.stack([np.asarray(vectors.get(word, mean)) for word in distinct])
    stretched = _stretched(table @ _projection(table.shape[1], numbers))
    row_of = {word: row for row, word in enumerate(distinct)}
    return [stretched[[row_of[word] for word in kind]] for kind in looked_up]


def _read_glove(path: Path, words: Iterable[str]) -> dict[str, list[str]]:
    """Read the numbers of words from a GloVe text file: a word and its numbers on each line,
    frequent words first.

    The first line of a word counts: glove.840B has later ones of the kind
        `at name@domain.com 0.01 ...`.
    """
    wanted = set(words)
    numbers: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, _, rest = line.rstrip().partition(" ")
            if word in wanted and word not in numbers:
                numbers[word] = rest.split(" ")
    return numbers


def _read(config: PriorsConfig, words: list[str]) -> dict[str, np.ndarray]:
    kind, _, name = config.source.partition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"word vector file {path} not found",
            fix="correct the path in priors.source, or download the vectors first",
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if config.sha256 not in (None, digest):
        raise DataError(
            f"{path} does not match priors.sha256",
            expected=f"sha256 {config.sha256}",
            got=f"sha256 {digest}",
            fix="use the original file, or remove priors.sha256",
        )
    log.info("word vectors from %s, sha256 %s", path, digest)
    try:
        known = _read_glove(path, words) if kind == "glove" else read_json(path)
        numbers = {word: known[word] for word in words if word in known}
        table = np.array(list(numbers.values()), dtype=np.float64)
        if numbers and (table.ndim != 2 or not table.shape[1] or not np.isfinite(table).all()):
            raise ValueError("none, NaN or infinity")
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a valid vector file",
            expected="equally many finite numbers for each word; a table is a JSON object of lists",
            got=str(error),
            fix="correct or replace the file",
        ) from None
    if not numbers:
        raise DataError(
            f"{path} has no vectors for the words of the users' metadata, such as {words[0]!r}",
            fix='map them to words in the file: words = {"M" = "male"}',
        )
    return dict(zip(numbers, table, strict=True))


def _projection(length: int, numbers: int) -> np.ndarray:
    """Projection `float64 [length, numbers]` with orthonormal rows or columns; the identity if
    lengths are equal."""
    if length == numbers:
        return np.eye(length)
    shape = max(length, numbers), min(length, numbers)
    square, triangle = np.linalg.qr(stream(0, "prior-projection").standard_normal(shape))
    columns = square * np.sign(np.diag(triangle))
    return columns if length > numbers else columns.T


def _stretched(table: np.ndarray) -> np.ndarray:
    """Rescale each column to [0, 1]; constant columns become 1/2."""
    low = table.min(0)
    width = table.max(0) - low
    return np.divide(table - low, width, out=np.full_like(table, 0.5), where=width > 0)


# A user's prior from the words of its metadata (Fang et al. 2022, equation 11).
#
#     mu_kj       = sum_w m_kwj mu_wj          + noise
#     gamma_kj^2  = sum_w (m_kwj - mu_kj)^2    + noise
#
# with m_kw the vector of the user's word of kind w (gender, occupation, ...), K numbers in [0, 1].
#
# Where this differs from the paper:
#
# - There, mu_w is the mean of m_kw over all users, which reveals the others' raw metadata. Here it
#   is the mean over the words of that kind, which is public.
# - There, noise is calibrated for a single scalar of one of the two, although K numbers of each are
#   released. Here all 2K are one release with the sensitivity of replacing all metadata of a user,
#   except in mode `paper`, which follows the paper.
# - Negative variances are not addressed; here variances have a lower bound, and means are clipped
#   to their range.

_SMALLEST_VARIANCE = 0.05  # because noise makes some variances negative


class _UserPriors:
    """Users' priors from their metadata.

    Args:
        vectors: word vectors by kind of metadata, `float64 [words, K]` in [0, 1].
        features: index of the client feature of each kind.
        settings: the users' noise; None: none.
    """

    def __init__(
        self, vectors: list[np.ndarray], features: list[int], settings: PersonalNoise | None
    ) -> None:
        self.vectors = vectors
        self.features = features
        self.settings = settings
        self.means = [kind_vectors.mean(0) for kind_vectors in vectors]
        self.highest = np.sum(self.means, axis=0)  # of mu_kj, as every m_kwj is at most 1

    def exact(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of a client's prior before noise, `float64 [K]` each.

        A client with several words of a kind has their mean, a client without any the mean of all
        words.
        """
        rows = []
        for vectors, mean, feature in zip(self.vectors, self.means, self.features, strict=True):
            codes = data.features[feature]
            codes = codes[codes >= 0]
            rows.append(vectors[codes].mean(0) if len(codes) else mean)
        metadata = np.stack(rows)
        mu = (metadata * np.stack(self.means)).sum(0)
        return mu, np.square(metadata - mu).sum(0)

    def of(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of a client's noisy prior, `float32 [K]` each; the same in every
        round."""
        mean, variance = self.exact(data)
        if self.settings is not None:
            random = stream(self.settings.own_seed, "personal-prior", data.client)
            mean_std, variance_std = self._stds(data.client, self.settings)
            mean = mean + mean_std * random.standard_normal(len(mean))
            variance = variance + variance_std * random.standard_normal(len(mean))
        mean = mean.clip(0, self.highest)
        variance = variance.clip(_SMALLEST_VARIANCE, np.maximum(_SMALLEST_VARIANCE, self._widest))
        return mean.astype(np.float32), variance.astype(np.float32)

    @property
    def sensitivities(self) -> tuple[float, float]:
        """Sensitivities of a user's mean and variance (L2 norm over all K numbers) if all its
        metadata change."""
        return float(np.linalg.norm(self.highest)), float(np.linalg.norm(self._widest))

    @property
    def _widest(self) -> np.ndarray:
        """Largest variance before noise, `float64 [K]`, of numbers in [0, max(1, highest)]."""
        return len(self.vectors) * np.square(np.maximum(1.0, self.highest))

    def _stds(self, client: int, settings: PersonalNoise) -> tuple[float, float]:
        """Standard deviations of the noise on each number of mean and variance."""
        if settings.mode == "paper":  # one kind of metadata changes, and one scalar is considered
            multiplier = settings.paper_multiplier(client)
            widest = float(np.square(np.maximum(1.0, self.highest)).max())
            return multiplier * float(np.max(self.means)), multiplier * widest
        mean, variance = self.sensitivities
        each = settings.prior_multiplier(client) * math.sqrt(2)  # each takes half of the cost
        return each * mean, each * variance


def user_priors(
    config: PriorsConfig | None, settings: PersonalNoise | None, model: Vae
) -> _UserPriors | None:
    """Priors for the users of a model's schema; None without a `priors` table.

    Args:
        config: the table.
        settings: the users' noise; None: no noise is added to priors, independently of the table.
        model: defines the user features and the size of a code.

    Raises:
        ExperimentError: the users have no such metadata.
        DataError: the file of the vectors is missing, another one, or lacks every word.
    """
    if config is None:
        return None
    features, words = model.schema.described(config.features)
    vectors = _word_vectors(config, words, model.config.latent)
    return _UserPriors(vectors, features, settings if config.noise else None)
