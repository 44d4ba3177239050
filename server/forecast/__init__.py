# SPDX-License-Identifier: Apache-2.0
"""What a run says before its first round: the nodes' training paths, and a warning of a model that
ranks alike for all users."""
