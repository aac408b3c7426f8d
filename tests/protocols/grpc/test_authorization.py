"""Keys of gRPC calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.domain.access import KeyGrant
from serve_app.domain.routing_table import RoutingTable
from serve_app.http2.frames import END_HEADERS, HEADERS, encode_frame
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.protocols.torchserve.grpc import INFERENCE
from tests.support.grpc_calls import access_table
from tests.support.http2_peer import Peer, request_fields


def test_the_key_is_checked_before_a_message_is_received(over_grpc: Any) -> None:
    """A call without a key ends when its headers arrive: nothing waits for its message."""
    server = over_grpc()
    grant = KeyGrant(frozenset({"infer"}), ("m",))
    server.reader.update(RoutingTable(2, server.reader.table.models, True, access_table(good=grant)))
    paths = {
        f"/{INFERENCE}/Predictions": "7",
        f"/{INFERENCE}/StreamPredictions2": "7",
        "/inference.GRPCInferenceService/ModelInfer": "16",
        "/inference.GRPCInferenceService/ModelStreamInfer": "16",
    }
    with Peer(server.address) as peer:
        for i, (path, status) in enumerate(paths.items()):
            fields = [(":path", path), *[f for f in request_fields() if f[0] != ":path"]]
            peer.send(encode_frame(HEADERS, END_HEADERS, 2 * i + 1, peer.encoder.encode(fields)))
            trailers = peer.read_response(2 * i + 1)[1]
            assert (trailers["grpc-status"], trailers["x-torchrelay-reason"]) == (status, "missing_token")
            assert trailers["x-request-id"]
    assert [(line[2], line[4]) for line in server.access_log] == [(p, int(s)) for p, s in paths.items()]


def test_the_owner_of_a_key_is_the_salt_of_cached_prefixes(over_grpc: Any) -> None:
    server = over_grpc()
    access = access_table(good=KeyGrant(frozenset({"infer"}), ("m",), name="first"))
    access = replace(access, isolates_prefix_cache=True)
    server.reader.update(RoutingTable(2, server.reader.table.models, True, access))
    metadata = (("authorization", "Bearer good"), ("cache_salt", "other"))
    stub = InferenceAPIsServiceStub(server.channel)
    stub.Predictions(PredictionsRequest(model_name="m", input={"body": b"x"}), metadata=metadata)
    [request] = server.backend.requests
    assert request.headers["cache_salt"] == "first"
