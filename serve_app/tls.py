"""TLS: from two PEM files to a context, or to words that say what is wrong with them."""

from __future__ import annotations

import ssl
from pathlib import Path

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings


def of_management(settings: Settings) -> ssl.SSLContext | None:
    """What the management and the metrics port speak: TLS 1.2 or newer; None where no certificate is named.

    Raises ConfigurationError, which names the setting, the file and the cure.
    """
    m = settings.management
    return _of(settings.root, "management", m.certificate_file, m.private_key_file, "HTTP")


def of_grpc(settings: Settings) -> ssl.SSLContext | None:
    """What the gRPC ports speak; None where no certificate is named. Raises ConfigurationError likewise."""
    g = settings.grpc
    return _of(settings.root, "grpc", g.certificate_file, g.private_key_file, "gRPC without TLS")


def _of(root: Path, room: str, certificate: str, key: str, without: str) -> ssl.SSLContext | None:
    if not certificate and not key:
        return None
    names = (f"{room}.certificate_file", f"{room}.private_key_file")
    for given, missing in ((certificate, names[0]), (key, names[1])):
        if not given:
            cure = f"name both, or neither for {without}"
            raise ConfigurationError(missing, f"TLS wants a certificate and its key; {cure}")
    return server(root / certificate, root / key, names)


def server(certificate: Path, key: Path, names: tuple[str, str]) -> ssl.SSLContext:
    """A server's context of two PEM files, which the settings ``names`` name: TLS 1.2 or newer.

    Raises ConfigurationError, which names the setting, the file and the cure.
    """
    _readable(names[0], certificate)
    _readable(names[1], key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        cure = "it must begin with -----BEGIN CERTIFICATE-----"
        raise ConfigurationError(names[0], f"{certificate} holds no certificate in PEM; {cure}") from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _Encrypted:
        cure = f"write it without with `openssl pkey -in {key} -out plain.pem`, readable by the server's user alone"
        raise ConfigurationError(names[1], f"{key} wants a password, which nobody could type; {cure}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            cure = "name the key that the certificate was made with"
            raise ConfigurationError(names[1], f"{key} is not the key of {certificate}; {cure}") from None
        cure = "it must begin with -----BEGIN PRIVATE KEY----- or the like"
        raise ConfigurationError(names[1], f"{key} holds no private key in PEM; {cure}") from None
    return context


def trusting(*certificates: Path) -> ssl.SSLContext:
    """A client's context for servers that show one of these certificates, whatever name it was made out to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for certificate in certificates:
        context.load_verify_locations(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _Encrypted(Exception):
    """The private key is encrypted."""


def _no_password() -> str:
    raise _Encrypted


def _readable(setting: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        cure = "name a file that the server's user can read"
        raise ConfigurationError(setting, f"{path}: {error.strerror}; {cure}") from None
