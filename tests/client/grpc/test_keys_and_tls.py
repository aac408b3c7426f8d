"""Keys, TLS and addresses of the gRPC clients."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_helpers import ClientFactory
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from serve_app.client import NO_RETRIES
from serve_app.client import errors as client_errors
from serve_app.client.grpc import GrpcClient
from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.routing_table import RoutingTable
from serve_app.protocols.grpc_app import inference_server
from serve_app.settings import load
from serve_app.telemetry.metrics import Meters


def access_table(**grants: KeyGrant) -> AccessTable:
    return AccessTable({sha256(key.encode()).digest(): grant for key, grant in grants.items()})


def test_key_is_checked_by_every_service(
    make_client: ClientFactory, over_grpc: Any, managed_by_grpc: Any
) -> None:
    server = over_grpc()
    grant = KeyGrant(frozenset({"infer"}), ("m",))
    server.reader.update(RoutingTable(2, server.reader.table.models, True, access_table(good=grant)))
    assert make_client(server, token="good").predict("m", b"x") == b"x"
    for token, reason in (("", "missing_token"), ("bad", "invalid_token"), ("good", "model_not_allowed")):
        client = make_client(server, token=token)
        with pytest.raises(client_errors.AuthenticationError) as first:
            client.predict("other", b"")
        with pytest.raises(client_errors.AuthenticationError) as second:
            client.infer("other", {"x": [1]})
        assert [(error.value.reason, error.value.status) for error in (first, second)] == [(reason, 401)] * 2
        for _ in range(20):  # gRPC forgets the reason address the requests go out at the same moment
            with pytest.raises(client_errors.AuthenticationError):
                list(
                    client.stream("other", b"")
                    if token == "good"
                    else client.stream_sequence("other", [b"x" * 1000])
                )
        assert client.live()
    managed = managed_by_grpc(access_table(good=KeyGrant(frozenset({"manage", "observe"}), ("*",))))
    assert make_client(None, managed, token="good").models() == []
    with pytest.raises(client_errors.AuthenticationError):
        make_client(None, managed).models()


def test_expired_key_is_renewed(
    make_client: ClientFactory, over_grpc: Any, management: Any, over_http: Any, tmp_path: Path
) -> None:
    """Keys are renewed over HTTP, as gRPC has no call for it; a request stream is not sent again."""
    keys = tmp_path / "key_file.json"
    renewed: list[str] = []

    def write(key: str) -> None:
        keys.write_text(json.dumps({"inference": {"key": key}, "API": {"key": "api"}}))

    async def renew_key(kind: str) -> None:
        renewed.append(kind)
        write("new")

    grants = {
        "old": KeyGrant(frozenset({"infer"}), ("*",), time.time() - 1),
        "new": KeyGrant(frozenset({"infer"}), ("*",)),
        "api": KeyGrant(frozenset({"token"}), ("*",)),
    }
    access = access_table(**grants)
    server, control = over_grpc(), management(access=access)
    server.reader.update(replace(server.reader.table, generation=2, access=access))
    control.control_api.renew_key = renew_key
    client = make_client(server, key_file=keys, token_url=over_http(control.app))
    with pytest.raises(client_errors.AuthenticationError):
        client.predict("m", b"")  # the file is not there yet
    write("old")
    assert client.predict("m", b"x") == b"x"
    write("old")
    assert list(client.stream("m", b"x")) == [b"x"]
    write("old")
    with pytest.raises(client_errors.AuthenticationError):
        list(client.stream_sequence("m", [b"x"]))
    assert [chunk.body for chunk in client.stream_sequence("m", [b"x"])] == [b"x"]
    assert renewed == ["inference"] * 3
    write("old")
    with pytest.raises(client_errors.AuthenticationError) as error:
        make_client(server, key_file=keys, token_url="http://127.0.0.1:1").predict("m", b"")
    assert error.value.reason == "expired_token"


def test_tls_connection(make_client: ClientFactory, grpc_listening: Any, tmp_path: Path) -> None:
    private_key, key, roots = (
        ec.generate_private_key(ec.SECP256R1()),
        tmp_path / "private_key.key",
        tmp_path / "roots.pem",
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private_key.public_key())
    )
    certificate = (
        certificate.serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = (
        certificate.add_extension(address, critical=False)
        .sign(private_key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    roots.write_bytes(pem)
    key.write_bytes(pem + private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(key)
    settings = load({})

    def server() -> Any:
        plane = DataPlane(
            RoutingTableReader(RoutingTable(1, {}, startup_complete=True)), Meters(), lambda ref, row: None
        )
        return inference_server(plane, ControlPlane(None, settings, lambda: None), settings, Meters())

    with grpc_listening(server, tls) as address:
        assert make_client(f"https://{address}", root_certificates=roots).ping() == "Healthy"
        with pytest.raises(grpc.RpcError, match="CERTIFICATE_VERIFY_FAILED"):
            make_client(f"https://{address}", retries=NO_RETRIES).ping()
        assert not make_client(f"http://{address}").live()


def test_invalid_addresses() -> None:
    for address in ("https://", "https://host/v1"):
        with pytest.raises(ValueError, match="https://HOST:PORT"):
            GrpcClient(address)


def test_http_client_does_not_import_grpc() -> None:
    code = "import sys, serve_app.client; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
