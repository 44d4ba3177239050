# SPDX-License-Identifier: Apache-2.0
"""Word vectors from three sources, transformed to K numbers in [0, 1].

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

from fedrec.errors import DataError
from fedrec.privacy.personal.priors import PriorsConfig
from fedrec.rng import stream
from fedrec.runtime.text_files import read_json

log = logging.getLogger("fedrec")


def word_vectors(
    config: PriorsConfig, words: Sequence[Sequence[str]], numbers: int
) -> list[np.ndarray]:
    """The vectors of the words of each kind of metadata, `float64 [words, numbers]`, in [0, 1].

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
    found = _onehot(distinct) if config.source == "onehot" else _read(config, distinct)
    missing = [word for word in distinct if word not in found]
    if missing:
        log.warning(
            "no vector for %d words, which get the mean of the others: %s",
            len(missing),
            ", ".join(missing),
        )
    mean = np.mean([found[word] for word in sorted(found)], axis=0)
    table = np.stack([np.asarray(found.get(word, mean)) for word in distinct])
    stretched = _stretched(table @ _projection(table.shape[1], numbers))
    place = {word: row for row, word in enumerate(distinct)}
    return [stretched[[place[word] for word in kind]] for kind in looked_up]


def read_glove(path: Path, words: Iterable[str]) -> dict[str, np.ndarray]:
    """The vectors of some words from a text file of GloVe: a word and its numbers on each line,
    frequent words first.

    The first line of a word counts: glove.840B has later ones of the kind
        `at name@domain.com 0.01 ...`.

    Raises:
        DataError: the line of a word has no numbers, or a different count than the others.
    """
    wanted = set(words)
    found = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, _, rest = line.rstrip().partition(" ")
            if word in wanted and word not in found:
                found[word] = _numbers(rest.split(" "), path, word)
    return _equally_long(found, path)


def _read(config: PriorsConfig, words: list[str]) -> dict[str, np.ndarray]:
    kind, _, name = config.source.partition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"there is no file {path}",
            expected=f"vectors of words, for {config.source!r}",
            got="no file",
            fix="correct the path in priors.source, or download the vectors first",
        )
    digest = _digest(path)
    if config.sha256 is not None and digest != config.sha256:
        raise DataError(
            f"{path} is another file",
            expected=f"sha256 {config.sha256}",
            got=f"sha256 {digest}",
            fix="name the file that was used before, or remove priors.sha256",
        )
    log.info("vectors of words from %s, sha256 %s", path, digest)
    found = read_glove(path, words) if kind == "glove" else _read_table(path, words)
    if not found:
        raise DataError(
            f"{path} has none of the words of the users' metadata",
            expected=", ".join(words[:5]) + (", ..." if len(words) > 5 else ""),
            got="none of them",
            fix='name words that it has: words = {"M" = "male"}',
        )
    return found


def _read_table(path: Path, words: list[str]) -> dict[str, np.ndarray]:
    try:
        table = read_json(path)
        found = {word: _numbers(table[word], path, word) for word in words if word in table}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no table of vectors",
            expected="a JSON object of lists",
            got=str(error),
            fix="write it with fedrec data glove-subset",
        ) from None
    return _equally_long(found, path)


def _numbers(values: Sequence[object], path: Path, word: str) -> np.ndarray:
    try:
        vector = np.array([float(str(value)) for value in values])
    except ValueError:
        vector = np.zeros(0)
    if not len(vector) or not np.isfinite(vector).all():
        raise DataError(
            f"{path} has no vector for {word!r}",
            expected="finite numbers",
            got=repr(values)[:80],
            fix="correct its line, or get the file again",
        )
    return vector


def _equally_long(found: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    lengths = sorted({len(vector) for vector in found.values()})
    if len(lengths) > 1:
        raise DataError(
            f"{path} has vectors of several lengths",
            expected="one length",
            got=str(lengths),
            fix="take all vectors from one file",
        )
    return found


def _onehot(words: list[str]) -> dict[str, np.ndarray]:
    return dict(zip(words, np.eye(len(words)), strict=True))


def _projection(length: int, numbers: int) -> np.ndarray:
    """`float64 [length, numbers]` with orthonormal rows or columns; the identity if the lengths are
    equal."""
    if length == numbers:
        return np.eye(length)
    longer = max(length, numbers)
    shorter = min(length, numbers)
    square, triangle = np.linalg.qr(
        stream(0, "prior-projection").standard_normal((longer, shorter))
    )
    columns = square * np.sign(np.diag(triangle))
    return columns if length > numbers else columns.T


def _stretched(table: np.ndarray) -> np.ndarray:
    """Each column rescaled to [0, 1]; constant columns are 1/2."""
    low = table.min(0)
    high = table.max(0)
    width = np.where(high > low, high - low, math.inf)
    return np.where(high > low, (table - low) / width, 0.5)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
