# SPDX-License-Identifier: Apache-2.0
"""What is said of an adversary with the results of a run."""

from fedrec.runs.folder import RunFolder


def test_a_finished_run_says_what_it_said_at_its_end(run_tiny):
    result = run_tiny("adversary={attack='random', share=0.2}")
    again = RunFolder(result.folder).read_result()
    assert again.privacy == result.privacy
    assert sum(line.startswith("Adversary: ") for line in again.privacy) == 1
