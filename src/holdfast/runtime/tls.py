# SPDX-License-Identifier: Apache-2.0
"""TLS contexts, and the rule that a port open to a network must have one.

The master's certificate comes from the user, and clients trust its authority. Agents have no
authority that would sign for them: each makes a certificate of its own at its start. The master
tells the other agents its *fingerprint*, and they accept that one certificate and no other.
"""

import datetime
import hashlib
import ipaddress
import math
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from holdfast.model.errors import AuthError, UsageError
from holdfast.runtime.transport import split_address

ALWAYS = datetime.datetime(2000, 1, 1)
FOR_EVER = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""The dates of certificates that we make. Each ends with its process or its job; other dates would
only make the clocks of two nodes matter, and end a long job. The second date is how X.509 writes
"no end" (RFC 5280)."""

WARN_BEFORE_S = 14 * 86400.0
WARN_AGAIN_S = 86400.0
"""When the end of a certificate is first reported, and how often again."""


def server_tls(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """The context of a server."""
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


class ServedCertificate:
    """The certificate that a server shows, as its files are now: they may be renewed while it
    serves.

    The server's owner calls `look` from time to time, and tells people what it returns.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """UsageError if the files cannot be used."""
        self._files = certificate, key
        self._stamp = _stamp(certificate, key)
        self._shown = server_tls(certificate, key)
        self._ends_at = _end_of(certificate)
        self._warned_at = -math.inf
        #: For servers; it stays the same one.
        self.context = server_tls(certificate, key)
        # Called in every handshake. A certificate that is loaded into the same context would stand
        # beside the old one if their keys are of different kinds, and half of it would stay if that
        # failed.
        self.context.sni_callback = self._show

    def look(self, wall_s: float) -> list[str]:
        """Take renewed files into use; returns sentences about that, and about an end that is
        near."""
        said = []
        stamp = _stamp(*self._files)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._shown = server_tls(*self._files)
            except UsageError as exc:
                said.append(f"{exc}; the one before it stays in use")
            else:
                self._ends_at, self._warned_at = _end_of(self._files[0]), -math.inf
                said.append(f"the certificate {self._files[0]} has changed: it is in use now")
        is_near = wall_s > self._ends_at - WARN_BEFORE_S
        if is_near and wall_s >= self._warned_at + WARN_AGAIN_S:
            self._warned_at = wall_s
            date = datetime.datetime.fromtimestamp(self._ends_at, datetime.UTC)
            verb, then = ("expires", "after that") if wall_s < self._ends_at else ("expired", "now")
            said.append(
                f"the certificate {self._files[0]} {verb} on {date:%Y-%m-%d at %H:%M} UTC: {then} "
                "agents and commands refuse it; replace the file, the new one is taken into use "
                "without a restart"
            )
        return said

    def _show(self, peer: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        peer.context = self._shown


def _stamp(*files: Path | None) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file does."""
    return tuple(_stamp_of(file) for file in files if file is not None)


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _end_of(certificate: Path) -> float:
    # Imported here: it takes 0.1 s, and only servers under TLS need it.
    from cryptography import x509

    try:
        first = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return math.inf  # It serves, which matters more than its date.
    return first.not_valid_after_utc.timestamp()


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate of this process alone, signed by itself."""

    tls: ssl.SSLContext
    """For a server that shows it."""
    fingerprint: str
    """What other agents know it by: the SHA-256 of the certificate, in hexadecimal."""


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
