# SPDX-License-Identifier: Apache-2.0
"""The canary audit: does a real run leak more than its epsilon says?

Canaries are clients of the run that upload, each into a table row of its own, a large update of
secret sign. How well the signs can be read out of what the run releases bounds the run's epsilon
from below. `docs/attacks.md` describes the procedure and what a bound does and does not say.
"""
