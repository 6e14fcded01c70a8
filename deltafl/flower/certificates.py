"""Certificates and keys of a federation: a CA, the SuperLink's certificate, and keys of nodes.

`python -m deltafl.flower.certificates FOLDER --host NAME --nodes 3` writes them for a deployment.
Private parts are readable by their owner alone, and nothing that exists is overwritten.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deltafl.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerFiles:
    """Where the certificates of a SuperLink lie."""

    ca: Path
    certificate: Path
    key: Path


def write_server(folder: Path, hosts: Sequence[str], days: int = 365) -> ServerFiles:
    """Make a CA and a certificate for the names and addresses of a SuperLink.

    The CA's key is used once and forgotten: it can never sign anything else.
    """
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("deltafl federation CA")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(_name(hosts[0]), ca_name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    files = ServerFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    write_private(files.ca, ca.public_bytes(Encoding.PEM))
    write_private(files.certificate, certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(files.key, private)
    return files


def write_node_key(folder: Path, name: str) -> tuple[Path, bytes]:
    """Make a node's key; return where its private part is, and its public part as PEM."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key()
    place = folder / name
    write_private(place, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_private(
        place.with_suffix(".pub"), public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    return place, public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists: choose an empty folder") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ a little
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def main() -> int:
    """Write the files of a deployment."""
    parser = argparse.ArgumentParser(description="Certificates and keys of a federation.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", action="append", required=True, help="name of the SuperLink")
    parser.add_argument("--nodes", type=int, default=1, help="how many node keys")
    parser.add_argument("--days", type=int, default=365, help="how long certificates are valid")
    given = parser.parse_args()
    try:
        given.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Whoever hands runs over does so on the SuperLink's own host.
        write_server(given.folder, [*given.host, *LOOPBACK], given.days)
        for number in range(given.nodes):
            write_node_key(given.folder, f"node-{number}")
    except (UserError, OSError, ValueError) as error:
        print(f"deltafl: {error}", file=sys.stderr)
        return 2
    print(f"{given.folder}: ca.pem for everybody, server.* for the SuperLink, a key for each node")
    return 0


if __name__ == "__main__":
    sys.exit(main())
