# SPDX-License-Identifier: Apache-2.0
"""Components by name: the registry, the check of a class against its contract, and errors that name
it."""
