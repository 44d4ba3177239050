# SPDX-License-Identifier: Apache-2.0
"""The run folder of an experiment."""
