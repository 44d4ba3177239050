# SPDX-License-Identifier: Apache-2.0
"""Memory, files and compiled code of this machine."""
