# SPDX-License-Identifier: Apache-2.0
"""Flower's own programs in a deployment, with what they lack (`patches`), and the operator's calls.

Flower's SuperNode polls every 3 s and starts a new Python for every message, which takes 2 s to
import torch; a receiver of a message waits 1 s for each missing piece. Here these waits are
shorter, and executors fork a process that has imported what it needs. With `patches`, these are the
only imports of Flower's private modules for deployments; they are counted in docs/deployment.md.
"""
