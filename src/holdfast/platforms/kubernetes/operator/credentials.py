# SPDX-License-Identifier: Apache-2.0
"""The secrets of one job: its token, and a certificate for its master that only this job trusts."""

import secrets
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from holdfast.platforms.kubernetes import names
from holdfast.runtime import tls
from holdfast.runtime.token import TOKEN_BYTES


def new_credentials(hosts: Sequence[str]) -> dict[str, bytes]:
    """The contents of a job's Secret, for a master with these host names.

    The authority signs this one certificate, and its key is then forgotten. Nothing expires in the
    middle of a job, so nothing has to be renewed: only this job trusts the certificate, and the
    certificate's key is deleted with the job's Secret.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("holdfast job")
    authority = (
        _certificate(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate(_name("holdfast master"), authority_name, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return {
        names.TOKEN_KEY: secrets.token_hex(TOKEN_BYTES).encode(),
        names.CA_KEY: authority.public_bytes(serialization.Encoding.PEM),
        names.CERT_KEY: certificate.public_bytes(serialization.Encoding.PEM),
        names.KEY_KEY: key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    }


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(tls.ALWAYS)
        .not_valid_after(tls.FOR_EVER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """An authority signs certificates; a server signs handshakes."""
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
