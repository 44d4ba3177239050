# SPDX-License-Identifier: Apache-2.0
"""Synthetic training rows: the parts of UPC-SDG (Liu et al., SIGIR 2022) and of similar
perturbations.

`preferences` has the users' replacement ratios and sensitivities, `selection` and `attention`
select rows, `similarity` compares items, `generator` learns the distribution of substitutes,
`substitutes` draws them, and `cooccurrence` is the noisy matrix of a generator with a guarantee.
"""
