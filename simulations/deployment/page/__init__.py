# SPDX-License-Identifier: Apache-2.0
"""A page about a running deployment, for its operator."""
