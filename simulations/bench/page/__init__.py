# SPDX-License-Identifier: Apache-2.0
"""The bench as one HTML page."""
