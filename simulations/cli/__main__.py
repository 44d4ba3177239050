# SPDX-License-Identifier: Apache-2.0
"""Run `fedrec` as `python -m simulations.cli`."""

from simulations.cli import main

main()
