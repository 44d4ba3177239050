# SPDX-License-Identifier: Apache-2.0
"""The reverse proxy with TLS in front of a deployment's server."""
