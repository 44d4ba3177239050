# SPDX-License-Identifier: Apache-2.0
"""The malicious users of a simulation in the data: what they know, and the users themselves."""
