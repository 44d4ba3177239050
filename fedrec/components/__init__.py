# SPDX-License-Identifier: Apache-2.0
"""Components by name: their registry, and errors that name a faulty component."""
