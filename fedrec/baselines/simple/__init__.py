# SPDX-License-Identifier: Apache-2.0
"""Reference systems that learn little or nothing: popularity, random, means and biases."""
