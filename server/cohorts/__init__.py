# SPDX-License-Identifier: Apache-2.0
"""The clients and their nodes (roster), the cohort of a round, and its distribution over nodes."""
