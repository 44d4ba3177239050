# SPDX-License-Identifier: Apache-2.0
"""Commands that attack or audit an experiment."""
