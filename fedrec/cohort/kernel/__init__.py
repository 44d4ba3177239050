# SPDX-License-Identifier: Apache-2.0
"""Local SGD of declared models in native code: the declaration, the parameters in memory, and the
compiled steps."""
