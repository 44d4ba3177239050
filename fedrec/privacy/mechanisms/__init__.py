# SPDX-License-Identifier: Apache-2.0
"""Privacy mechanisms, one per file: noise of a round, and the cost of a run's rounds."""
