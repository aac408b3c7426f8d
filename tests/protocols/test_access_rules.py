"""Every place where a key's expiry and its models are checked, by the APIs' own lists of routes and methods.

A route or method that these tables do not have fails here.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import grpc
import pytest

from serve_app.control.api import ControlPlane
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelSpec
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.proto import inference_pb2, management_pb2, open_inference_grpc_pb2
from serve_app.protocols import openapi
from serve_app.protocols.http_app import management_app
from serve_app.settings import Settings
from tests.support.protocol_fakes import FakeControlAPI, send_request

EVERYTHING = frozenset(("infer", "observe", "manage"))
ACCESS = AccessTable(
    {
        sha256(b"past").digest(): KeyGrant(EVERYTHING | {"token"}, expires=time.time() - 1),
        sha256(b"team").digest(): KeyGrant(EVERYTHING, ("team-*",)),
        sha256(b"all").digest(): KeyGrant(EVERYTHING),
    }
)
MODELS = dict.fromkeys(("m", "team-a"), ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)}))
TABLE = RoutingTable(1, MODELS, startup_complete=True, access=ACCESS)
PARAMETERS = {**dict.fromkeys(("model_name", "model_id", "workflow_name"), "m"), "model_version": "1.0"}
PARAMETERS["id"] = "0" * 32

# HTTP. Routes that need no key:
OPEN = {"/", "/ping", "/v2", "/api-description", "/openapi.json", "/docs"}
OPEN |= {f"{prefix}/health/{state}" for prefix in ("", "/v2") for state in ("live", "ready")}
# Routes without a model in their path: "query" and "body" name one, and a "list" has only those of the key.
# "form" is a body of multipart/form-data.
# "control": the control plane checks the patterns or the grant that it receives; its own tests have these.
RULES = {
    **dict.fromkeys(("/invocations", "/logs", "/swagger.json"), "query"),
    **dict.fromkeys((f"/v1/{name}" for name in ("completions", "chat/completions", "responses")), "body"),
    **dict.fromkeys((f"/v1/{name}" for name in ("embeddings", "rerank", "score")), "body"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "form"),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), "body"),
    **dict.fromkeys(("/v2/models/stats", "/v2/repository/index", "/v1/models", "/models"), "list"),
    **dict.fromkeys(("/async", "/async/{id}", "/async/{id}/result"), "control"),
    **dict.fromkeys(("/experiments", "/workflows", "/events", "/audit"), "control"),
    **{f"/experiments/{{experiment_id}}{end}": "control" for end in ("", "/history", "/events")},
    **dict.fromkeys(("/keys", "/keys/{key_name}", "/keys/{key_name}/rotate"), "control"),
    **dict.fromkeys(("/token", "/access", "/version"), "no model"),
}
FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
REGISTRATION = ("management", "POST", "/models")  # "control", beside the list of the same path


def list_routes(port: str, document: Any) -> list[tuple[str, str, str]]:
    return [
        (port, endpoint.method, endpoint.path)
        for endpoint in document.table.endpoints
        if endpoint.method != "OPTIONS" and endpoint.path not in OPEN
    ]


ROUTES = list_routes("inference", openapi.inference()) + list_routes("management", openapi.management())


def ask(app: Any, method: str, path: str, key: str) -> Any:
    rule = RULES.get(path)
    body = {"body": json.dumps({"model": "m"}).encode(), "form": FORM}.get(rule, b"")
    query = "?model_name=m&model=m" if rule == "query" else "?url=m-1.0.mar&type=inference"
    target = re.sub(r"{(\w+)}", lambda match: PARAMETERS.get(match[1], "x"), path)
    headers = {"Authorization": f"Bearer {key}"}
    if rule == "form":
        headers["Content-Type"] = "multipart/form-data; boundary=x"
    return app(method, target + query, body, headers)


@pytest.fixture
def ports(asgi_inference: Any, management: Any) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        if name == "inference":
            return asgi_inference(table=TABLE)
        app = management(access=ACCESS)
        for model in MODELS:
            app.control_api.put(ModelSpec(model, "1.0", f"{model}.mar", "sha256", "archive"))
        return app

    return build


@pytest.mark.parametrize(("port", "method", "path"), ROUTES)
def test_every_route_refuses_an_expired_key(ports: Any, port: str, method: str, path: str) -> None:
    app = ports(port)
    response = ask(app, method, path, "past")
    assert (400 <= response.status < 500, response["x-torchrelay-reason"]) == (True, "expired_token")
    assert not (app.backend.requests if port == "inference" else app.control_api.operations)


@pytest.mark.parametrize(("port", "method", "path"), ROUTES)
def test_every_route_is_limited_to_the_models_of_the_key(
    ports: Any, port: str, method: str, path: str
) -> None:
    has_model = {"model_name", "model_id", "workflow_name"} & set(re.findall(r"{(\w+)}", path))
    rule = "path" if has_model else RULES[path]
    if rule in ("control", "no model") or (port, method, path) == REGISTRATION:
        return
    response = ask(ports(port), method, path, "team")
    if rule == "list":
        assert response.status == 200 and b'"m"' not in response.body
    else:
        assert response["x-torchrelay-reason"] == "model_not_allowed", response.body


# gRPC

OPEN_METHODS = {"Ping", "ServerLive", "ServerReady", "ServerMetadata"}
METHOD_RULES = {"ListModels": "list", "RepositoryIndex": "list", "RegisterModel": "control"}
SERVICES = {
    "inference": [
        inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"],
        open_inference_grpc_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    ],
    "management": [management_pb2.DESCRIPTOR.services_by_name["ManagementAPIsService"]],
}
METHODS = [
    pytest.param(port, method, id=f"{service.name}.{method.name}")
    for port, services in SERVICES.items()
    for service in services
    for method in service.methods
    if method.name not in OPEN_METHODS
]


class Method:
    """A method of a server, which is called with a message about the model ``m``."""

    def __init__(self, channel: grpc.Channel, method: Any) -> None:
        self._channel = channel
        self._method = method
        self._path = f"/{method.containing_service.full_name}/{method.name}"

    def message(self) -> bytes:
        message = self._method.input_type._concrete_class()
        for field in ("model_name", "name", "sequence_id"):
            if field in message.DESCRIPTOR.fields_by_name:
                setattr(message, field, "m")
        return bytes(message.SerializeToString())

    def open(self, messages: Iterator[bytes], key: str) -> Any:
        """Return the responses to ``messages``, of which others than streams take the first."""
        metadata = [("authorization", f"Bearer {key}")]
        if self._method.client_streaming:
            return self._channel.stream_stream(self._path)(messages, metadata=metadata, timeout=60)
        return self._channel.unary_stream(self._path)(next(messages), metadata=metadata, timeout=60)

    def __call__(self, key: str) -> tuple[list[bytes], str]:
        """Return the responses, and the reason of an error of the call or of its last response."""
        try:
            responses = list(self.open(iter([self.message()]), key))
        except grpc.RpcError as error:
            return [], dict(error.trailing_metadata() or ()).get("x-torchrelay-reason", "")
        return responses, find_reason(responses[-1]) if responses else ""


def find_reason(response: bytes) -> str:
    """Return the reason of an error that is a message of a stream."""
    found = re.search(rb"expired_token|invalid_token|model_not_allowed", response)
    return found[0].decode() if found else ""


@pytest.fixture
def methods(over_grpc: Any, managed_by_grpc: Any) -> Callable[[str, Any], tuple[Method, Any]]:
    def build(port: str, method: Any) -> tuple[Method, Any]:
        server = over_grpc(table=TABLE) if port == "inference" else managed_by_grpc(ACCESS)
        for model in MODELS if port == "management" else ():
            server.control_api.put(ModelSpec(model, "1.0", f"{model}.mar", "sha256", "archive"))
        return Method(server.channel, method), server

    return build


@pytest.mark.parametrize(("port", "method"), METHODS)
def test_every_method_refuses_an_expired_key_and_other_models(methods: Any, port: str, method: Any) -> None:
    call, _ = methods(port, method)
    assert call("past") == ([], "expired_token")
    rule = METHOD_RULES.get(method.name)
    responses, reason = call("team")
    if rule == "list":
        assert re.findall(rb"\b(?:team-a|m)\b", responses[0]) and b'"m"' not in responses[0]
    elif rule is None:
        assert reason == "model_not_allowed"


# Calls and responses that last

STREAMS = [param for param in METHODS if param.values[1].client_streaming]


@pytest.mark.parametrize("reason", ["expired_token", "invalid_token"])
@pytest.mark.parametrize(("port", "method"), STREAMS)
def test_the_key_of_an_open_stream_is_checked_for_each_request(
    methods: Any, port: str, method: Any, reason: str
) -> None:
    call, server = methods(port, method)
    expired = {sha256(b"all").digest(): KeyGrant(EVERYTHING, expires=time.time() - 1)}
    answered = threading.Event()

    def send() -> Iterator[bytes]:
        yield call.message()
        assert answered.wait(60)
        yield call.message()

    responses = call.open(send(), "all")
    assert find_reason(next(responses)) == ""
    count = len(server.backend.requests)
    access = AccessTable(expired if reason == "expired_token" else {})
    server.reader.update(replace(TABLE, generation=2, access=access))
    answered.set()
    assert find_reason(list(responses)[-1]) == reason
    assert len(server.backend.requests) == count


def test_a_stream_of_events_ends_with_its_key() -> None:
    access, polls = [ACCESS], []
    control_api = FakeControlAPI()

    async def poll_events(*query: Any) -> list[Any]:
        polls.append(query)
        if len(polls) == 3:
            access[0] = AccessTable({})  # the key is revoked
        assert len(polls) < 5, "the stream goes on"
        return []

    control_api.poll_events = poll_events  # type: ignore[attr-defined]
    control_api.put(ModelSpec("m", "1.0", "m.mar", "sha256", "archive"))
    settings = Settings()
    app = management_app(ControlPlane(control_api, settings, lambda: access[0]), settings)
    key = {"Authorization": "Bearer all"}
    response = send_request(app, "GET", "/models/m/events?follow=true&since=1", b"", key)
    assert (response.status, response.ended, len(polls)) == (200, True, 3)
