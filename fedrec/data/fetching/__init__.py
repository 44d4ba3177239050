# SPDX-License-Identifier: Apache-2.0
"""Getting public datasets: downloaded, or taken over from a copy that the user has."""
