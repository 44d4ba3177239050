# SPDX-License-Identifier: Apache-2.0
"""Files, processes and shared memory."""
