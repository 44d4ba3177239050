# SPDX-License-Identifier: Apache-2.0
"""Synthetic training rows (UPC-SDG, Liu et al., SIGIR 2022) and what its neighbours share with it.

`preferences` is what users want replaced and how alike a substitute may be, `selection` and
`attention` choose rows, `similarity` says how alike two items are, `generator` learns what to put
in their place, `substitutes` draws it, and `cooccurrence` is the noisy matrix of a generator with a
guarantee.
"""
