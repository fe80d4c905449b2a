# SPDX-License-Identifier: Apache-2.0
"""The certificates of a test cluster: an authority, the API server's, and those of its users."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2045, 1, 1)


def make_authority(folder: Path) -> None:
    """Leaves ca.crt and ca.key."""
    key = new_key(folder / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    builder = _builder(name, key.public_key(), name).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    _write(folder / "ca.crt", builder.sign(key, hashes.SHA256()))


def make_server_certificate(folder: Path, names: Sequence[str], addresses: Sequence[str]) -> None:
    """Leaves server.crt and server.key, for these host names and addresses."""
    known = [x509.DNSName(name) for name in names]
    numbers = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    alternatives = x509.SubjectAlternativeName([*known, *numbers])
    _issue(folder, "server", subject, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)


def make_client_certificate(folder: Path, user: str, group: str) -> tuple[Path, Path]:
    """A certificate and its key that make their bearer this user, in this group."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, group),
            x509.NameAttribute(NameOID.COMMON_NAME, user),
        ]
    )
    return _issue(folder, f"client-{user}", subject, ExtendedKeyUsageOID.CLIENT_AUTH)


def new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key, also written to a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The API server reads no newer form of a key for tokens.
    form, unencrypted = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, unencrypted))
    return key


def _issue(
    folder: Path,
    stem: str,
    subject: x509.Name,
    usage: x509.ObjectIdentifier,
    alternatives: x509.SubjectAlternativeName | None = None,
) -> tuple[Path, Path]:
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    certificate, key_file = folder / f"{stem}.crt", folder / f"{stem}.key"
    key = new_key(key_file)
    builder = _builder(subject, key.public_key(), authority.subject)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    _write(certificate, builder.sign(signer, hashes.SHA256()))
    return certificate, key_file


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(BEGIN).not_valid_after(END)


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
