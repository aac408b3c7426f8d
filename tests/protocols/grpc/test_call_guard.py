"""Checks of the management port before a call's message is read, over real connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from serve_app.domain.access import KeyGrant
from serve_app.http2.frames import END_HEADERS, HEADERS, SETTINGS
from serve_app.proto.management_pb2 import ListModelsRequest, RegisterModelRequest
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.protocols.grpc import call_guard
from tests.support.grpc_calls import access_table, expect_error
from tests.support.http2_peer import Peer, encode_frame, request_fields

_LIST = "/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels"


def _open_call(peer: Peer, stream: int, **metadata: str) -> None:
    """Send the head of a call, and not its message."""
    fields = {**dict(request_fields(**metadata)), ":path": _LIST, "te": "trailers"}
    pseudo = [(name, value) for name, value in fields.items() if name[0] == ":"]
    others = [(name, value) for name, value in fields.items() if name[0] != ":"]
    peer.send(encode_frame(HEADERS, END_HEADERS, stream, peer.encoder.encode(pseudo + others)))


def _read_status(peer: Peer, stream: int) -> str:
    for kind, _, number, body in peer.frames():
        if kind == HEADERS and number == stream:
            fields = {
                key if isinstance(key, str) else key.decode(): value
                for key, value in peer.decoder.decode(body)
            }
            if "grpc-status" in fields:
                return str(fields["grpc-status"])
        elif kind == HEADERS:
            peer.decoder.decode(body)
    raise AssertionError("the server closed the connection")


@pytest.fixture
def limited(managed_by_grpc: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Serve with a short timeout of messages."""

    def build(**options: Any) -> Any:
        limits = call_guard.CallLimits
        monkeypatch.setattr(
            "serve_app.protocols.grpc_app.CallLimits",
            lambda max_calls: limits(max_calls=max_calls, message_timeout=0.2),
        )
        return managed_by_grpc(**options)

    return build


def test_a_call_without_a_key_ends_before_its_message(managed_by_grpc: Any) -> None:
    server = managed_by_grpc(access_table(ops=KeyGrant(frozenset({"manage"}))))
    with Peer(server.address) as peer:
        _open_call(peer, 1)
        assert _read_status(peer, 1) == str(grpc.StatusCode.PERMISSION_DENIED.value[0])
        _open_call(peer, 3, authorization="Bearer other")
        assert _read_status(peer, 3) == str(grpc.StatusCode.PERMISSION_DENIED.value[0])
    assert server.access_log[0][4] == grpc.StatusCode.PERMISSION_DENIED.value[0]


def test_a_call_whose_message_does_not_come_ends(limited: Callable[..., Any]) -> None:
    with Peer(limited().address) as peer:
        _open_call(peer, 1)
        assert _read_status(peer, 1) == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


def test_calls_without_a_key_leave_places_for_those_with_one(managed_by_grpc: Any) -> None:
    limit = {"management_max_concurrent_calls": 2}
    server = managed_by_grpc(access_table(ops=KeyGrant(frozenset({"observe"}))), grpc=limit)
    health = HealthStub(server.channel)
    watches = [health.Watch(HealthCheckRequest()) for _ in range(2)]
    for watch in watches:
        next(watch)
    refused = expect_error(lambda request, timeout: next(health.Watch(request)), HealthCheckRequest())
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc.management_max_concurrent_calls" in refused.details()
    stub = ManagementAPIsServiceStub(server.channel)
    stub.ListModels(ListModelsRequest(), metadata=[("authorization", "Bearer ops")])
    for watch in watches:
        watch.cancel()


def test_messages_have_a_limit_of_their_own(managed_by_grpc: Any) -> None:
    stub = ManagementAPIsServiceStub(managed_by_grpc().channel)
    error = expect_error(stub.RegisterModel, RegisterModelRequest(url="x" * (1 << 20)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_server_announces_its_limit_of_streams(managed_by_grpc: Any) -> None:
    with Peer(managed_by_grpc().address) as peer:
        _, body = peer.wait_for(SETTINGS)
        values = {
            int.from_bytes(body[i : i + 2], "big"): int.from_bytes(body[i + 2 : i + 6], "big")
            for i in range(0, len(body), 6)
        }
        assert values[3] == 32
