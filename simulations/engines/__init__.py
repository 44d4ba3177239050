# SPDX-License-Identifier: Apache-2.0
"""The engines, which run the same experiment."""
