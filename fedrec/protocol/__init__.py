# SPDX-License-Identifier: Apache-2.0
"""What server and clients send each other, as Flower records."""
