# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about one run or several."""
