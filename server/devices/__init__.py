# SPDX-License-Identifier: Apache-2.0
"""Late devices: simulated time, which answers of a round come in time, and rounds that wait for
nobody."""
