# SPDX-License-Identifier: Apache-2.0
"""Commands of a deployment and of its clients."""
