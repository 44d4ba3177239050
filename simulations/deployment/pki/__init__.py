# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys of a deployment."""
