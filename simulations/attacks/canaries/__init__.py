# SPDX-License-Identifier: Apache-2.0
"""Canary clients of an audit: what is added to an experiment, releases, and the claim."""
