# SPDX-License-Identifier: Apache-2.0
"""Local SGD in native code, for models that declare a kernel: parameters in memory, and compiled
steps."""
