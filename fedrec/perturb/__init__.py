# SPDX-License-Identifier: Apache-2.0
"""Perturbations of training rows; `fedrec.data.perturbation` is their interface."""
