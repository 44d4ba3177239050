# SPDX-License-Identifier: Apache-2.0
"""Messages between server and clients, as Flower records."""
