# SPDX-License-Identifier: Apache-2.0
"""The engines that run an experiment: serial, ray and flower."""
