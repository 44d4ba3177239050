# SPDX-License-Identifier: Apache-2.0
"""Raw files of datasets: downloaded, imported, unpacked, verified and read."""
