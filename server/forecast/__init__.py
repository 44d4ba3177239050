# SPDX-License-Identifier: Apache-2.0
"""Forecast of a run before its first round: duration, memory, and the nodes' training paths."""
