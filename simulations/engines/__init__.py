# SPDX-License-Identifier: Apache-2.0
"""The engines: one experiment, three places to run it."""
