# SPDX-License-Identifier: Apache-2.0
"""A user's prior from the words of its metadata (Fang et al. 2022, equation 11).

    mu_kj       = sum_w m_kwj mu_wj          + noise
    gamma_kj^2  = sum_w (m_kwj - mu_kj)^2    + noise

with m_kw the vector of the user's word of kind w (gender, occupation, ...), K numbers in [0, 1].

Where this differs from the paper:

- There, mu_w is the mean of m_kw over all users, which reveals the others' raw metadata. Here it is
  the mean over the words of that kind, which is public.
- There, noise is calibrated for a single scalar of one of the two, although K numbers of each are
  released. Here all 2K are one release with the sensitivity of replacing all metadata of a user,
  except in mode `paper`, which follows the paper.
- Negative variances are not addressed; here variances have a lower bound, and means are clipped to
  their range.
"""

import math

import numpy as np
import torch

from fedrec.data.client_data import ClientData
from fedrec.models.vae import Prior, Vae
from fedrec.priors.sources import word_vectors
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.privacy.personal.priors import PriorsConfig
from fedrec.rng import stream

_SMALLEST_VARIANCE = 0.05  # because noise makes some variances negative


class UserPriors:
    """Computes users' priors from their metadata.

    Args:
        vectors: for each kind of metadata the vectors of its words, `float64 [words, K]` in [0, 1].
        features: index of the client feature of each kind.
        config: the `priors` table.
        settings: the users' noise; None: none.
    """

    def __init__(
        self,
        vectors: list[np.ndarray],
        features: list[int],
        config: PriorsConfig,
        settings: PersonalNoise | None,
    ) -> None:
        self.vectors = vectors
        self.features = features
        self.config = config
        self.settings = settings if config.noise else None
        self.means = [own.mean(0) for own in vectors]
        self.highest = np.sum(self.means, axis=0)  # of mu_kj, as every m_kwj is at most 1

    def exact(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of a client's prior before noise, `float64 [K]` each.

        A client with several words of a kind has their mean, a client without any the mean of all
        words.
        """
        rows = []
        for own, mean, place in zip(self.vectors, self.means, self.features, strict=True):
            codes = data.features[place]
            codes = codes[codes >= 0]
            rows.append(own[codes].mean(0) if len(codes) else mean)
        metadata = np.stack(rows)
        mu = (metadata * np.stack(self.means)).sum(0)
        return mu, np.square(metadata - mu).sum(0)

    def of(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of a client's prior, `float32 [K]` each; the same in every round."""
        mean, variance = self.exact(data)
        if self.settings is not None:
            random = stream(self.settings.own_seed, "personal-prior", data.client)
            mean_std, variance_std = self._stds(data.client, self.settings)
            mean = mean + mean_std * random.standard_normal(len(mean))
            variance = variance + variance_std * random.standard_normal(len(mean))
        mean = mean.clip(0, self.highest)
        variance = variance.clip(_SMALLEST_VARIANCE, np.maximum(_SMALLEST_VARIANCE, self._widest))
        return mean.astype(np.float32), variance.astype(np.float32)

    def prior(self, data: ClientData, device: torch.device) -> Prior:
        """The same as a prior of one client, `[1, 1, K]`."""
        mean, variance = (torch.from_numpy(part)[None, None].to(device) for part in self.of(data))
        return Prior(mean, variance)

    @property
    def sensitivities(self) -> tuple[float, float]:
        """Largest L2 change of a user's mean and variance, all K numbers together, if all its
        metadata change."""
        return float(np.linalg.norm(self.highest)), float(np.linalg.norm(self._widest))

    @property
    def _widest(self) -> np.ndarray:
        """Largest variance before noise, `float64 [K]`: both numbers of a difference are in [0,
        max(1, highest)]."""
        return len(self.vectors) * np.square(np.maximum(1.0, self.highest))

    def _stds(self, client: int, settings: PersonalNoise) -> tuple[float, float]:
        """Standard deviations of the noise on each number of mean and variance."""
        if settings.mode == "paper":  # one kind of metadata changes, and one scalar is considered
            scalars = (
                float(np.max(self.means)),
                float(np.square(np.maximum(1.0, self.highest)).max()),
            )
            multiplier = settings.budget(client).paper_multiplier
            return multiplier * scalars[0], multiplier * scalars[1]
        mean, variance = self.sensitivities
        each = settings.prior_multiplier(client) * math.sqrt(2)  # each takes half of the cost
        return each * mean, each * variance


def user_priors(
    config: PriorsConfig | None, settings: PersonalNoise | None, model: Vae
) -> UserPriors | None:
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
    return UserPriors(word_vectors(config, words, model.config.latent), features, config, settings)
