# SPDX-License-Identifier: Apache-2.0
"""Which clients there are, which take part in a round, and which node trains them."""
