# SPDX-License-Identifier: Apache-2.0
"""Session secrets outlive a process, each step is taken once, and secrets of finished sessions are
deleted."""

import stat

import pytest

from clients.storage.session_secrets import SessionSecrets
from fedrec.errors import ClientError

ONE, TWO = b"1" * 16, b"2" * 16
SECRETS = {"mask-seed": b"\x00secret-of-sixteen", "place": b"\x01"}


@pytest.fixture(params=["disk", "memory"])
def reopened(request, tmp_path):
    """Opens the secrets as another process would; in memory there is only one process."""
    if request.param == "disk":
        return lambda: SessionSecrets(tmp_path / "private" / "secure-0.sqlite")
    kept = SessionSecrets(None)
    return lambda: kept


def test_a_node_has_one_channel_key(reopened):
    assert reopened().channel(b"first") == b"first"
    assert reopened().channel(b"other") == b"first"


def test_a_session_goes_one_way(reopened):
    reopened().begin(ONE, SECRETS)
    assert reopened().look(ONE) == reopened().look(ONE) == SECRETS
    reopened().masked(ONE, {"left": b"over"})
    assert reopened().waiting(ONE) == {"left": b"over"}
    for step in (lambda: reopened().look(ONE), lambda: reopened().masked(ONE, {})):
        with pytest.raises(ClientError, match="stage 'shared'"):
            step()
    reopened().end(ONE)
    for step in (
        lambda: reopened().end(ONE),
        lambda: reopened().waiting(ONE),
        lambda: reopened().look(ONE),
    ):
        with pytest.raises(ClientError, match="does not take that step"):
            step()


def test_nothing_is_unmasked_before_it_is_masked_or_in_another_session(reopened):
    reopened().begin(ONE, SECRETS)
    for step in (
        lambda: reopened().waiting(ONE),
        lambda: reopened().end(ONE),
        lambda: reopened().look(TWO),
    ):
        with pytest.raises(ClientError):
            step()
    assert reopened().look(ONE) == SECRETS


def test_a_new_session_ends_the_one_before_and_keeps_the_channel(reopened):
    reopened().channel(b"key")
    reopened().begin(ONE, SECRETS)
    reopened().masked(ONE, SECRETS)
    reopened().begin(TWO, {"place": b"\x02"})
    with pytest.raises(ClientError):
        reopened().waiting(ONE)
    assert reopened().look(TWO) == {"place": b"\x02"} and reopened().channel(b"other") == b"key"


def test_the_file_is_readable_by_its_owner_only_and_deletes(tmp_path):
    file = tmp_path / "private" / "secure-0.sqlite"
    kept = SessionSecrets(file)
    assert not file.exists()
    kept.begin(ONE, SECRETS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = SECRETS["mask-seed"].hex().encode()
    assert secret in file.read_bytes()
    kept.masked(ONE, {"place": b"\x01"})
    kept.end(ONE)
    assert all(secret not in other.read_bytes() for other in file.parent.iterdir())
