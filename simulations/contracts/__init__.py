# SPDX-License-Identifier: Apache-2.0
"""Contract tests of components, exported by `fedrec.testing`."""
