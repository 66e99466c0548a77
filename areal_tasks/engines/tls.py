"""Certificates of one start of a run, by which services on other machines authenticate themselves.

The flow makes an `Identity` that is the certificate authority as long as its process runs. Each machine makes its own
identity, and the flow signs its key: no private key leaves its machine. Clients trust that authority and no other.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

KEY: Final = "key.pem"
CERTIFICATE: Final = "certificate.pem"
AUTHORITY: Final = "authority.pem"  # whose signature such certificates have
_VALID: Final = timedelta(days=366)  # longer than a start of a flow lasts
_CLOCKS_DIFFER: Final = timedelta(days=2)  # no protocol compares the clocks of machines

Trust = ssl.SSLContext | bool  # whom a client trusts; True: the authorities that this machine trusts


class Identity:
    """A new private key and its self-signed certificate; with an `address`, that of a server there."""

    def __init__(self, name: str, address: str = "", authority: bool = False) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._signed(self._name, self._key.public_key(), address, authority)
        self.certificate = own.public_bytes(Encoding.PEM).decode()

    def sign(self, certificate: str, address: str = "") -> str:
        """A certificate that this authority signs for the key of another `certificate`, of a server at `address`."""
        other = x509.load_pem_x509_certificate(certificate.encode())
        key = other.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return self._signed(other.subject, key, address, False).public_bytes(Encoding.PEM).decode()

    def write(self, folder: Path, certificate: str, authority: str = "") -> None:
        """Write the private key, the certificate to show, and the authority's; only this user can read them."""
        key = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for name, content in ((KEY, key), (CERTIFICATE, certificate.encode()), (AUTHORITY, authority.encode())):
            path = folder / name
            path.touch(mode=0o600)
            path.write_bytes(content)

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, address: str, authority: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if address:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


@cache
def trusting(certificate: str) -> Trust:
    """Trust in this certificate (PEM) and those that it has signed, and in no others. Empty: this machine's default."""
    return _only(certificate) if certificate else True


def _only(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate)
    return context


def mutual_tls(server: str, identity: Identity, certificate: str) -> ssl.SSLContext:
    """A client's context: it trusts the certificate `server` alone, and shows the `certificate` of `identity`."""
    context = _only(server)
    with TemporaryDirectory(prefix="arealflow-tls-") as folder:
        identity.write(Path(folder), certificate)
        context.load_cert_chain(Path(folder) / CERTIFICATE, Path(folder) / KEY)
    return context
