# SPDX-License-Identifier: Apache-2.0
"""Personalised federated recommendation as plug-ins: a model, a client step with private state, a
strategy."""
