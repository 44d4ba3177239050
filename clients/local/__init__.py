# SPDX-License-Identifier: Apache-2.0
"""What local steps share: examples, descent, histories, per-example gradients, noise of a user's
own."""
