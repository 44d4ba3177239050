# SPDX-License-Identifier: Apache-2.0
"""What deployments need of Flower that it lacks: one missing feature a file, named in its first
lines.

For each there is a test that fails when Flower has the feature, or has moved what is replaced.
"""
