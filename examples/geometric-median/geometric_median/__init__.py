# SPDX-License-Identifier: Apache-2.0
"""A robust rule and an attack as plug-ins: the geometric median, and updates with the sign
reversed."""
