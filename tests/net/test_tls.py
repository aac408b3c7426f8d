"""TLS of our own listeners: what is served, what is refused, and the errors of invalid files."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_app.deployments.listeners.grpc import GrpcListener, ManagementGrpcListener, load_credentials
from serve_app.deployments.listeners.http import HttpListener
from serve_app.errors import ConfigurationError
from serve_app.http2.server import Http2Server
from serve_app.net import tls
from serve_app.settings import GrpcSettings, ManagementSettings, Settings
from tests.support.ports import free_port

DAY = datetime.timedelta(days=1)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a certificate without a matching host name and its key as two PEM files."""

    def pair(name: str = "own", password: bytes = b"") -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name}.example.com")])
        now = datetime.datetime.now(datetime.timezone.utc)
        made = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        )
        made = (
            made.serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )
        certificate_file, key_file = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        certificate_file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        encryption = (
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        key_file.write_bytes(private)
        return certificate_file, key_file

    return pair


def settings(certificate: Path | str, key: Path | str) -> Settings:
    return Settings(
        management=ManagementSettings(certificate_file=str(certificate), private_key_file=str(key))
    )


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls.management_context(Settings()) is None


def test_a_listener_speaks_tls_and_nothing_older(make: Callable[..., tuple[Path, Path]]) -> None:
    certificate, key = make()
    stranger, _ = make("stranger")
    port = free_port()
    url = f"https://127.0.0.1:{port}"

    async def run() -> None:
        listener = HttpListener(
            hello, "127.0.0.1", port, "management.port", tls.management_context(settings(certificate, key))
        )
        await listener.open()
        try:
            async with httpx.AsyncClient(verify=tls.client_context(certificate), timeout=60) as client:
                assert (await client.get(url)).text == "https"
            async with httpx.AsyncClient(verify=tls.client_context(stranger), timeout=60) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(url)
            old = tls.client_context(certificate)
            with pytest.warns(DeprecationWarning):
                old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            async with httpx.AsyncClient(verify=old, timeout=60) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get(url)
            async with httpx.AsyncClient(timeout=60) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(url.replace("https", "http"))
        finally:
            await listener.close()

    asyncio.run(run())


def test_paths_start_at_home(make: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    make()
    management = ManagementSettings(certificate_file="own.pem", private_key_file="own.key")
    assert tls.management_context(Settings(management=management, home=str(tmp_path))) is not None


def test_errors_of_wrong_files(make: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    certificate, key = make()
    _, other = make("other")
    _, locked = make("locked", b"secret")
    rubbish, missing = tmp_path / "rubbish", tmp_path / "missing"
    rubbish.write_text("no PEM")
    cases = [
        (certificate, "", "management.private_key_file: TLS wants a certificate and its key; name both"),
        ("", key, "management.certificate_file: TLS wants a certificate and its key; name both"),
        (missing, key, f"management.certificate_file: {missing}: No such file or directory; name a file"),
        (certificate, tmp_path, f"management.private_key_file: {tmp_path}: Is a directory; name a file"),
        (
            rubbish,
            key,
            f"management.certificate_file: {rubbish} holds no certificate in PEM; it must begin with",
        ),
        (key, key, f"management.certificate_file: {key} holds no certificate in PEM"),
        (
            certificate,
            rubbish,
            f"management.private_key_file: {rubbish} holds no private key in PEM; it must begin",
        ),
        (certificate, certificate, f"management.private_key_file: {certificate} holds no private key in PEM"),
        (
            certificate,
            other,
            f"management.private_key_file: {other} is not the key of {certificate}; name the key",
        ),
        (
            certificate,
            locked,
            f"management.private_key_file: {locked} is encrypted with a password, which the server cannot "
            "enter;",
        ),
    ]
    for given, private, result in cases:
        with pytest.raises(ConfigurationError) as caught:
            tls.management_context(settings(given, private))
        assert str(caught.value).startswith(result)


async def word(data: bytes, context: Any) -> bytes:
    return b"here"


METHODS = {"Say": grpc.unary_unary_rpc_method_handler(word)}


def inference_listener(settings: Settings) -> GrpcListener:
    server = Http2Server()
    server.add_registered_method_handlers("test.Test", METHODS)
    return GrpcListener(server, "127.0.0.1", free_port(), "grpc.port", tls.grpc_context(settings))


def management_listener(settings: Settings) -> ManagementGrpcListener:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", METHODS),))
    credentials = load_credentials(settings)
    return ManagementGrpcListener(server, "127.0.0.1", free_port(), "grpc.management_port", credentials)


@pytest.mark.parametrize("create", [inference_listener, management_listener])
def test_grpc_has_a_pair_of_its_own(make: Callable[..., tuple[Path, Path]], create: Any) -> None:
    certificate, key = make("localhost")
    settings = Settings(grpc=GrpcSettings(certificate_file=str(certificate), private_key_file=str(key)))
    assert tls.grpc_context(Settings()) is None
    assert load_credentials(Settings()) is None

    async def main() -> bytes:
        listener = create(settings)
        await listener.open()
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        name = [("grpc.ssl_target_name_override", "localhost.example.com")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{listener.port}", trusted, name) as channel:
            result = await channel.unary_unary("/test.Test/Say")(b"", timeout=60)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary("/test.Test/Say")(b"", timeout=60)
        await listener.close()
        return result

    assert asyncio.run(main()) == b"here"


def test_half_a_pair_of_grpcs_is_refused(make: Callable[..., tuple[Path, Path]]) -> None:
    certificate, _ = make()
    with pytest.raises(ConfigurationError) as raised:
        tls.grpc_context(Settings(grpc=GrpcSettings(certificate_file=str(certificate))))
    assert (
        str(raised.value)
        == "grpc.private_key_file: TLS wants a certificate and its key; name both, or neither for gRPC"
        " without TLS"
    )
