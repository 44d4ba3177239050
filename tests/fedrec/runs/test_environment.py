# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of the code that made it."""

import subprocess

from fedrec.runs import environment


def test_the_commit_is_that_of_the_checkout(monkeypatch, tmp_path):
    git = ["git", "-C", str(tmp_path)]
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    for changed, expected in ((False, "{}"), (True, "{}+")):
        environment.commit.cache_clear()
        if not changed:
            assert environment.commit() is None
            subprocess.run([*git, "init", "-q"], check=True)
            (tmp_path / "a").write_text("1")
            subprocess.run([*git, "add", "a"], check=True)
            subprocess.run([*git, *identity, "commit", "-q", "-m", "a"], check=True)
        else:
            (tmp_path / "a").write_text("2")
        environment.commit.cache_clear()
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        assert environment.commit() == expected.format(head)
    environment.commit.cache_clear()
