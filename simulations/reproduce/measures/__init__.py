# SPDX-License-Identifier: Apache-2.0
"""What tasks of the papers measure beyond the metrics of a run (`simulations.study.study.Task`)."""
