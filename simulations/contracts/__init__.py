# SPDX-License-Identifier: Apache-2.0
"""Contract tests, a module for each kind of component; `fedrec.testing` exports them."""
