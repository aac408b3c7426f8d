"""TLS: from two PEM files to a context, or to words that say what is wrong with them."""

from __future__ import annotations

import ssl
from pathlib import Path

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings

_CERTIFICATE, _KEY = "management.certificate_file", "management.private_key_file"


def of_management(settings: Settings) -> ssl.SSLContext | None:
    """What the management and the metrics port speak: TLS 1.2 or newer; None where no certificate is named.

    Raises ConfigurationError, which names the setting, the file and the cure.
    """
    m = settings.management
    if not m.certificate_file and not m.private_key_file:
        return None
    for given, missing in ((m.certificate_file, _CERTIFICATE), (m.private_key_file, _KEY)):
        if not given:
            raise ConfigurationError(missing, "TLS wants a certificate and its key; name both, or neither for HTTP")
    return server(settings.root / m.certificate_file, settings.root / m.private_key_file, (_CERTIFICATE, _KEY))


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
