# SPDX-License-Identifier: Apache-2.0
"""The processes of a deployment: command lines, supervision, forks, nodes and server."""
