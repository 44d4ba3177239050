# SPDX-License-Identifier: Apache-2.0
"""Studies: many runs, each in its own folder; what is done is not repeated, and what was
interrupted continues."""
