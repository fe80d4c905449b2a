# SPDX-License-Identifier: Apache-2.0
"""TLS contexts, and the rule that a port open to a network must have one.

The master's certificate comes from the user, and clients trust its authority. Agents have nobody
who would sign for them: each makes a certificate of its own at its start, the master tells others
its *fingerprint*, and these accept that one certificate and no other.
"""

import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from holdfast.model.errors import AuthError, UsageError
from holdfast.runtime.transport import split_address

ALWAYS = datetime.datetime(2000, 1, 1)
FOR_EVER = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""The dates of certificates that we make. Each ends with its process or its job; others would only
make the clocks of two nodes matter, and end a long job. X.509 writes "no end" so (RFC 5280)."""


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The context of a server; None without a certificate."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(f"the certificate {certificate} cannot be used: {exc}") from exc
    return context


def client_tls(authority: Path | None) -> ssl.SSLContext | None:
    """The context of a client that trusts this authority alone; None without one."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(f"the certificate authority {authority} cannot be used: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate of this process alone, that nobody else has signed."""

    tls: ssl.SSLContext
    """For a server that shows it."""
    fingerprint: str
    """What others know it by: the SHA-256 of the certificate, in hexadecimal."""


def new_identity() -> Identity:
    """Draw a key and make a certificate of it. Neither is ever on a disk."""
    # Imported here: it takes 0.1 s, and most agents need none.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast agent")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ALWAYS)
        .not_valid_after(FOR_EVER)
        .sign(key, hashes.SHA256())
    )
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    # The ssl module reads keys from files only: this one has no name, and is in memory.
    with open(os.memfd_create("identity"), "wb") as file:
        file.write(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted))
        file.write(certificate.public_bytes(pem))
        file.flush()
        tls = server_tls(Path(f"/proc/self/fd/{file.fileno()}"), None)
    assert tls is not None
    return Identity(tls, certificate.fingerprint(hashes.SHA256()).hex())


def secure_pinned(peer: socket.socket, address: str, fingerprint: str) -> ssl.SSLSocket:
    """TLS with the server that has this very certificate; AuthError if it shows another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Names, dates and authorities say nothing about it: the fingerprint says it all.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    secured = context.wrap_socket(peer)
    shown = hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()
    if shown != fingerprint:
        secured.close()
        raise AuthError(
            f"{address} shows another certificate than its agent told the master "
            f"({shown[:16]}... instead of {fingerprint[:16]}...)"
        )
    return secured


def require_tls(address: str, *, has_tls: bool, insecure: bool) -> None:
    """Refuse a readable channel on a network that others share."""
    host, _ = split_address(address)
    if has_tls or insecure or _is_loopback(host):
        return
    raise UsageError(
        f"{address} is not a loopback address: give certificates (master: --tls-cert and "
        "--tls-key, nodes: --tls-ca), or say --insecure if the network is private"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
