# SPDX-License-Identifier: Apache-2.0
"""What a node keeps: private state, uploads, session secrets, participation."""
