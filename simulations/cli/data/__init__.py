# SPDX-License-Identifier: Apache-2.0
"""Commands around data: datasets, word vectors, perturbation, synthesis."""
