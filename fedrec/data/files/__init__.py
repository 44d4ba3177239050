# SPDX-License-Identifier: Apache-2.0
"""Raw files of datasets: unpacking, verification and reading."""
