from __future__ import annotations

import socket
import ssl
import stat
import subprocess
import sys
import threading

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from deltafl import UserError
from deltafl.flower import certificates


def handshake(files, name, ca):
    """Let a server and a client talk; return the client's error, or None."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve():
        try:
            with server.wrap_socket(theirs, server_side=True):
                pass
        except (ssl.SSLError, OSError):
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name):
            return None
    except ssl.SSLError as error:
        return error
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "superlink.example.org"])
def test_a_client_with_the_ca_trusts_the_server(tmp_path, name):
    files = certificates.write_server(tmp_path, [*certificates.LOOPBACK, "superlink.example.org"])
    assert handshake(files, name, files.ca) is None


def test_another_name_or_another_ca_is_not_trusted(tmp_path):
    files = certificates.write_server(tmp_path, ["localhost"])
    assert handshake(files, "elsewhere.example.org", files.ca) is not None
    other = tmp_path / "other"
    other.mkdir()
    stranger = certificates.write_server(other, ["localhost"])
    assert handshake(files, "localhost", stranger.ca) is not None


def test_private_parts_are_private_and_nothing_is_overwritten(tmp_path):
    certificates.write_server(tmp_path, ["localhost"])
    key, public = certificates.write_node_key(tmp_path, "node-0")
    assert load_ssh_private_key(key.read_bytes(), None).curve.name == "secp384r1"
    assert public.startswith(b"-----BEGIN PUBLIC KEY-----")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="exists"):
        certificates.write_server(tmp_path, ["localhost"])


def test_the_command_writes_a_deployment(tmp_path):
    command = [sys.executable, "-m", "deltafl.flower.certificates", str(tmp_path / "keys")]
    done = subprocess.run([*command, "--host", "a.example.org", "--nodes", "2"], check=True)
    assert done.returncode == 0
    names = {path.name for path in (tmp_path / "keys").iterdir()}
    assert names == {
        *("ca.pem", "server.pem", "server.key"),
        *("node-0", "node-0.pub", "node-1", "node-1.pub"),
    }
    again = subprocess.run([*command, "--host", "b"], check=False, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert "Traceback" not in again.stderr
