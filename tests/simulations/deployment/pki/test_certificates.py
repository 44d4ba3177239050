# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys, checked with OpenSSL and OpenSSH's formats."""

import socket
import ssl
import stat
import subprocess
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from simulations.deployment.pki.certificates import Authority
from simulations.deployment.pki.keys import NodeKey, new_secret, private_folder, write_private


@pytest.fixture
def files(tmp_path):
    """An authority, a server's certificate signed by it, and another authority, as files."""
    own, foreign = Authority.create("own"), Authority.create("foreign")
    issued = own.issue(["localhost", "127.0.0.1"])
    for name, content in {
        "ca.crt": own.issued.certificate,
        "foreign.crt": foreign.issued.certificate,
        "server.crt": issued.certificate,
        "server.key": issued.key,
    }.items():
        write_private(tmp_path / name, content)
    return tmp_path


def shake_hands(files, authority, name):
    """A TLS handshake on loopback; raises what the client raises."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files / "server.crt", files / "server.key")
    client = ssl.create_default_context(cafile=str(files / authority))
    # required of every certificate by newer versions of Python
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            try:
                with server.wrap_socket(listener.accept()[0], server_side=True) as connection:
                    connection.recv(1)
            except OSError:
                pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with (
            socket.create_connection(listener.getsockname()) as bare,
            client.wrap_socket(bare, server_hostname=name),
        ):
            pass
        thread.join(timeout=5)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_client_with_the_authority_accepts_the_server(files, name):
    shake_hands(files, "ca.crt", name)


@pytest.mark.parametrize(
    ("authority", "name"), [("foreign.crt", "localhost"), ("ca.crt", "elsewhere")]
)
def test_another_authority_or_name_is_refused(files, authority, name):
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(files, authority, name)


def test_openssl_verifies_the_chain(files):
    command = "openssl verify -x509_strict -purpose sslserver -CAfile ca.crt server.crt"
    try:
        done = subprocess.run(command.split(), cwd=files, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert done.returncode == 0, done.stdout + done.stderr


def test_node_keys_are_pairs_that_openssh_reads():
    one, other = NodeKey.create(), NodeKey.create()
    private, public = load_ssh_private_key(one.private, None), load_ssh_public_key(one.public)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert private.public_key().public_numbers() == public.public_numbers()
    assert public.curve.name == "secp384r1"
    assert one.private != other.private and new_secret() != new_secret() and len(new_secret()) == 64


def test_private_files_are_private_from_their_first_moment(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    file = write_private(folder / "secret", "x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    assert stat.S_IMODE(write_private(file, b"y").stat().st_mode) == 0o600
    assert file.read_bytes() == b"y"
    assert [p.name for p in folder.iterdir()] == ["secret"]
