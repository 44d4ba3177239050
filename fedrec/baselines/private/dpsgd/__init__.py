# SPDX-License-Identifier: Apache-2.0
"""Private systems that are trained by DP-SGD on users."""
