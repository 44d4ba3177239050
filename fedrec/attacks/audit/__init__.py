# SPDX-License-Identifier: Apache-2.0
"""The canary audit: does a run leak more than its epsilon allows?

Canaries are clients of the run that upload, each into a table row of its own, a large update of
secret sign. The accuracy with which the signs can be inferred from the releases gives a lower bound
on the run's epsilon. `docs/attacks.md` describes the procedure and the meaning of the bounds.
"""
