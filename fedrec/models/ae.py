# SPDX-License-Identifier: Apache-2.0
"""A denoising autoencoder over whole histories (Mult-DAE, Liang et al. 2018, section 2.2.2).

The network of `fedrec.models.vae` with the encoder's mean as the code: only dropout is random, and
there are no variance and no prior. It is trained by the steps of the variational autoencoder;
`beta` has no effect, and priors of users' codes are rejected.

Where this differs from the paper: Liang et al. have no layer between code and output. Fang et al.
2022 (tables 4 and 11) say of their autoencoder only that its code has 20 numbers.
"""

import torch
from torch import Tensor

from fedrec.errors import ExperimentError
from fedrec.models.base import Parameters
from fedrec.models.vae import Draw, Prior, Tap, Vae, VaeConfig


class AeConfig(VaeConfig):
    """Settings of the autoencoder."""


class Ae(Vae):
    """Encoder and decoder."""

    name = "ae"
    Config = AeConfig
    paper = "Mult-DAE (Liang et al. 2018)"
    config: AeConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Like the variational autoencoder's parameters, without the layer of log-variances."""
        drawn = super().initial(generator)
        return {name: value for name, value in drawn.items() if not name.startswith("log-variance")}

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue, `[C, B, items]`."""
        return self.decode(parameters, self.code(parameters, histories))

    def parts(
        self,
        parameters: Parameters,
        histories: Tensor,
        draw: Draw,
        prior: Prior | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The terms of the bound: log-probabilities of the items `[C, B, items]`, and divergences
        `[C, B]`. The divergence is zero here.

        Raises:
            ExperimentError: priors are given, although codes have no distribution.
        """
        if prior is not None:
            raise ExperimentError(
                "an autoencoder's codes have no prior",
                expected="no step.priors, or model.name = 'vae'",
                got="priors and model.name = 'ae'",
                fix="leave out step.priors",
            )
        codes = self.code(parameters, histories, draw.kept, tap)
        return torch.log_softmax(self.decode(parameters, codes, tap), -1), codes.new_zeros(
            codes.shape[:-1]
        )
