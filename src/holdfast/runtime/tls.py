# SPDX-License-Identifier: Apache-2.0
"""TLS contexts, and the rule that a port open to a network must have one."""

import ipaddress
import ssl
from pathlib import Path

from holdfast.model.errors import UsageError
from holdfast.runtime.transport import split_address


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
