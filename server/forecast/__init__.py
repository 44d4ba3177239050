# SPDX-License-Identifier: Apache-2.0
"""What is known of a run before its first round: its duration and memory, and how nodes train."""
