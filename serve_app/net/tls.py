"""TLS contexts from PEM files, with errors that name the problem and the remedy."""

from __future__ import annotations

import ssl
from pathlib import Path

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings


def management_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context of the management and metrics ports, TLS 1.2 or newer; None without a certificate.

    Raises ConfigurationError, which names the setting, the file and the remedy.
    """
    m = settings.management
    return _load_context(settings.root, "management", m.certificate_file, m.private_key_file, "HTTP")


def grpc_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context of the gRPC ports; None without a certificate. Raises ConfigurationError."""
    g = settings.grpc
    return _load_context(settings.root, "grpc", g.certificate_file, g.private_key_file, "gRPC without TLS")


def _load_context(
    root: Path, section: str, certificate: str, key: str, without: str
) -> ssl.SSLContext | None:
    if not certificate and not key:
        return None
    names = (f"{section}.certificate_file", f"{section}.private_key_file")
    for given, missing in ((certificate, names[0]), (key, names[1])):
        if not given:
            remedy = f"name both, or neither for {without}"
            raise ConfigurationError(missing, f"TLS wants a certificate and its key; {remedy}")
    return server_context(root / certificate, root / key, names)


def server_context(certificate: Path, key: Path, names: tuple[str, str]) -> ssl.SSLContext:
    """Return a server's context, TLS 1.2 or newer, of two PEM files; ``names`` are their settings.

    Raises ConfigurationError, which names the setting, the file and the remedy.
    """
    _check_readable(names[0], certificate)
    _check_readable(names[1], key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        remedy = "it must begin with -----BEGIN CERTIFICATE-----"
        raise ConfigurationError(names[0], f"{certificate} holds no certificate in PEM; {remedy}") from None
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except _EncryptedKey:
        remedy = (
            f"write it without with `openssl pkey -in {key} -out "
            "plain.pem`, readable by the server's user alone"
        )
        raise ConfigurationError(
            names[1], f"{key} is encrypted with a password, which the server cannot enter; {remedy}"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            remedy = "name the key that the certificate was made with"
            raise ConfigurationError(names[1], f"{key} is not the key of {certificate}; {remedy}") from None
        remedy = "it must begin with -----BEGIN PRIVATE KEY----- or the like"
        raise ConfigurationError(names[1], f"{key} holds no private key in PEM; {remedy}") from None
    return context


def client_context(*certificates: Path) -> ssl.SSLContext:
    """Return a client's context that trusts servers with these certificates, whatever their host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for certificate in certificates:
        context.load_verify_locations(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _EncryptedKey(Exception):
    """The private key is encrypted."""


def _refuse_password() -> str:
    raise _EncryptedKey


def _check_readable(setting: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        remedy = "name a file that the server's user can read"
        raise ConfigurationError(setting, f"{path}: {error.strerror}; {remedy}") from None
