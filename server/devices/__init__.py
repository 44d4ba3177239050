# SPDX-License-Identifier: Apache-2.0
"""Simulated time: which answers of a round come in time, and rounds that wait for nobody."""
