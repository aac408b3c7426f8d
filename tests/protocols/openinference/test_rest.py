"""The HTTP routes: health, metadata, errors, keys and the repository."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from handlers.errors import PredictionException
from serve_app import errors as server_errors
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef
from serve_app.domain.routing_table import VersionRoute
from serve_app.errors import HandlerRejected
from serve_app.protocols.openinference import errors
from tests.support import protocol_fakes
from tests.support.error_classes import list_subclasses
from tests.support.openinference_requests import build_document


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/identity/infer", 405),
        ("POST", "/v2", 405),
        ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/models/identity/versions", 404),
        ("GET", "/v2/models/identity/other", 404),
        ("GET", "/v2/models/missing", 404),
        ("GET", "/v2/models/missing/config", 404),
        ("GET", "/v2/models/identity/versions/9/ready", 404),
        ("POST", "/v2/models/missing/infer", 404),
        ("GET", "/v2/trace/setting", 404),
        ("OPTIONS", "/v2/models/identity/infer", 204),
    ],
)
def test_unknown_paths_and_methods_are_rejected(
    send_request: Any, method: str, path: str, status: int
) -> None:
    response = send_request(method, path, {"inputs": []} if path.endswith("infer") else b"")
    assert response.status_code == status
    if status >= 400:
        assert list(response.json()) == ["error"]


def test_health_readiness_and_repository_index(send_request: Any, models: Any) -> None:
    assert send_request("GET", "/v2/health/live").json() == {"live": True}
    assert send_request("GET", "/v2/health/ready").json() == {"ready": True}
    assert send_request("GET", "/v2/models/plain/ready").json() == {"name": "plain", "ready": True}
    models.put(ModelRef("plain", "1.0"), VersionRoute("1.0", "loading", 0, last_error="out of luck"))
    response = send_request("GET", "/v2/models/plain/ready")
    assert (response.status_code, response.json()) == (503, {"name": "plain", "ready": False})
    models.put(ModelRef("plain", "2.0"), VersionRoute("2.0", "failed", 0, last_error="out of luck"))
    assert send_request("POST", "/v2/repository/index").json()[1:3] == [
        {"name": "plain", "version": "1.0", "state": "LOADING", "reason": ""},
        {"name": "plain", "version": "2.0", "state": "UNAVAILABLE", "reason": "out of luck"},
    ]
    assert {row["name"] for row in send_request("POST", "/v2/repository/index", {"ready": True}).json()} == {
        "identity",
        "signed",
    }
    assert send_request("GET", "/v2/models/plain").json()["versions"] == ["1.0", "2.0"]


def test_models_without_a_signature_have_empty_metadata(send_request: Any) -> None:
    metadata = send_request("GET", "/v2/models/plain").json()
    assert (metadata["inputs"], metadata["outputs"]) == ([], [])


def test_every_error_class_has_a_status() -> None:
    for cls in list_subclasses():
        status = next(errors.TABLE[parent] for parent in [*cls.__mro__, Exception] if parent in errors.TABLE)
        assert 400 <= status < 600
    assert errors.find_status(ZeroDivisionError()) == 500
    assert errors.find_status(HandlerRejected("no", 418)) == 418
    assert errors.find_status(HandlerRejected("no", 200)) == 500
    assert errors.find_status(server_errors.QueueFull("m", None, ""), generates=True) == 429
    assert errors.find_status(server_errors.QueueFull("m", None, "")) == 503
    assert errors.to_document(ZeroDivisionError("secret"), "id")["error"] == (
        "Unexpected ZeroDivisionError; the server's log has more under id."
    )


def test_errors_of_handlers(send_request: Any, models: Any) -> None:
    models.add("refuses", lambda data, context: [PredictionException("too dark", 422)])
    models.add("fails", lambda data, context: [1 / 0])
    response = send_request("POST", "/v2/models/refuses/infer", build_document([1.0]))
    assert (response.status_code, response.json()) == (422, {"error": "too dark"})
    response = send_request("POST", "/v2/models/fails/infer", build_document([1.0]))
    assert (response.status_code, response.json()) == (500, {"error": "Prediction failed"})


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("config", 501, "is not served"),
        ("file:1/model.pt", 501, "is not served"),
        ("wrokers", 400, "url and workers"),
    ],
)
def test_unsupported_parameters_of_a_load_are_rejected(
    send_request: Any, name: str, status: int, message: str
) -> None:
    response = send_request(
        "POST", "/v2/repository/models/plain/load", json.dumps({"parameters": {name: "x"}}).encode()
    )
    assert response.status_code == status
    assert name in response.json()["error"] and message in response.json()["error"]


def test_keys_limit_routes_and_models(send_request: Any, models: Any) -> None:
    def key(name: str, *rights: str, models: tuple[str, ...] = ("*",)) -> tuple[bytes, KeyGrant]:
        return sha256(name.encode()).digest(), KeyGrant(frozenset(rights), models)

    models.grant(
        AccessTable(
            dict(
                [
                    key("infer-key", "infer", models=("plain",)),
                    key("observe-key", "observe"),
                    key("manage-key", "manage"),
                ]
            )
        )
    )
    infer, load = "/v2/models/plain/infer", "/v2/repository/models/plain/load"

    def status(method: str, path: str, bearer: str | None) -> int:
        headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
        response = send_request(method, path, build_document([1.0]) if path == infer else b"", **headers)
        assert response.status_code == 200 or list(response.json()) == ["error"]
        return response.status_code

    assert [status("GET", path, None) for path in ("/v2", "/v2/health/live", "/v2/health/ready")] == [200] * 3
    assert status("POST", infer, None) == 401
    assert status("POST", infer, "wrong") == 401
    assert status("POST", infer, "infer-key") == 200
    assert status("POST", infer, "observe-key") == 403
    assert status("GET", "/v2/models/identity", "infer-key") == 403
    assert status("GET", "/v2/models/identity", "observe-key") == 200
    assert status("GET", "/v2/models/stats", "observe-key") == 200
    assert status("POST", load, "infer-key") == 403
    assert status("POST", load, "observe-key") == 403
    assert status("POST", load, "manage-key") == 200
    index = send_request("POST", "/v2/repository/index", authorization="Bearer infer-key").json()
    assert {row["name"] for row in index} == {"plain"}


def test_a_key_that_is_revoked_while_a_body_arrives_loads_nothing(send_request: Any, models: Any) -> None:
    grants = {sha256(b"key").digest(): KeyGrant(frozenset({"manage"}))}
    models.grant(AccessTable(grants))
    path, headers = "/v2/repository/models/plain/load", {"authorization": "Bearer key"}

    def revoke() -> bytes:
        grants.clear()
        return b"}"

    response = protocol_fakes.send_request(models.app(), "POST", path, [b"{", revoke], headers)
    assert (response.status, models.operations) == (401, [])


def test_a_streamed_response_is_one_text_of_infer(send_request: Any, models: Any) -> None:
    def stream_words(data: list, context: Any) -> list:
        for word in ("once ", "upon "):
            context.emit(0, word)
        return ["a time"]

    models.add("streams", stream_words)
    [output] = send_request("POST", "/v2/models/streams/infer", build_document([1.0])).json()["outputs"]
    assert (output["name"], output["data"]) == ("output-0", ["once upon a time"])
