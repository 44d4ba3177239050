# SPDX-License-Identifier: Apache-2.0
"""Flower's own programs with some parts replaced; the only imports of its private modules for
deployments.

Flower's SuperNode polls every 3 s and starts a new Python for every message, which takes 2 s to
import torch; a receiver of a message waits 1 s for each missing piece. Here these waits are
shorter, and executors fork a process that has imported what it needs. A test reports what broke
when a new version of Flower changes such a part.
"""
