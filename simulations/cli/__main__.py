# SPDX-License-Identifier: Apache-2.0
"""`python -m simulations.cli` is `fedrec`."""

from simulations.cli import main

main()
