# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page about one or several runs."""
