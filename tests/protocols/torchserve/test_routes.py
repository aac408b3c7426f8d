"""The other ways to ask a model: KServe's, SageMaker's, and those of TorchServe's first years."""

from __future__ import annotations

import json

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy, allocate

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=XX"
PART = b'--XX\r\nContent-Disposition: form-data; name="model_name"\r\n\r\nm\r\n--XX--\r\n'


def message(response) -> tuple[int, str, str]:
    result = json.loads(response.body)
    return response.status, result["type"], result["message"]


NOT_FOUND = (
    404,
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
NO_NAME = (400, "BadRequestException", "Parameter model_name is required.")


@pytest.mark.parametrize(
    ("path", "version", "kind"),
    [
        ("/v1/models/m:predict", None, "predict"),
        ("/v1/models/m:explain/", None, "explain"),
        ("/v2/models/m/explain", None, "explain"),
        ("/models/m/invoke", None, "predict"),
        ("/endpoints/m/invocations", None, "predict"),
        ("/m/predict", None, "predict"),
        ("/m/2.0/predict/", "2.0", "predict"),
        ("/invocations?model_name=m", None, "predict"),
    ],
)
def test_every_route_runs_the_model(inference, path: str, version: str | None, kind: str) -> None:
    app = inference()
    response = app("POST", path, b'{"instances": [1]}', {"Content-Type": "application/json", "X-Who": "me"})
    assert response.status == 200
    [call] = app.backend.requests
    assert (call.model, call.version, call.kind) == ("m", version, kind)
    assert call.inputs[-1] == InputPart("body", b'{"instances": [1]}', "application/json")
    assert call.headers["x-who"] == "me"
    assert call.headers["explain"] == str(kind == "explain")
    assert "url_path" not in call.headers
    assert app.access_log[0][7:9] == ("m", version or "1.0")


@pytest.mark.parametrize("path", ["/predictions/m", "/v1/models/m:predict", "/v2/models/m/explain"])
def test_query_is_ignored_where_torchserve_ignores_it(inference, path: str) -> None:
    app = inference()
    app("GET", f"{path}?a=1", b"x")
    assert app.backend.requests[0].inputs == (InputPart("body", b"x"),)


@pytest.mark.parametrize(
    "path", ["/models/m/invoke", "/endpoints/m/invocations", "/m/predict", "/m/1.0/predict"]
)
def test_the_query_comes_before_the_body(inference, path: str) -> None:
    app = inference()
    app("POST", f"{path}?a=1&b=%20c+d&a=2&e", b"x")
    app("POST", f"{path}?a=1", b"f=2", {"Content-Type": FORM})
    app("GET", path)
    given = (InputPart("a", b"1"), InputPart("b", b" c d"), InputPart("a", b"2"), InputPart("e", b""))
    assert [call.inputs for call in app.backend.requests] == [
        (*given, InputPart("body", b"x")),
        (InputPart("a", b"1"), InputPart("f", b"2")),
        (InputPart("body", b""),),
    ]


@pytest.mark.parametrize(
    ("query", "body", "content_type"),
    [
        ("?model_name=m&a=1", b"", ""),
        ("?a=1", b"model_name=m", FORM),
        ("?model_name=", PART, MULTIPART),
        ("?model_name=m", b"model_name=none", FORM),
    ],
)
def test_an_invocation_names_its_model(inference, query: str, body: bytes, content_type: str) -> None:
    app = inference()
    headers = {"Content-Type": content_type} if content_type else {}
    assert app("POST", f"/invocations{query}", body, headers).status == 200
    assert app.backend.requests[0].model == "m"


def table(**loaded_at_startup: bool) -> RoutingTable:
    rows = {
        name: VersionRoute("1.0", "ready", 1, loaded_at_startup=flag)
        for name, flag in loaded_at_startup.items()
    }
    return RoutingTable(
        1, {name: ModelRoute("1.0", {"1.0": row}) for name, row in rows.items()}, startup_complete=True
    )


def test_an_invocation_without_a_name_is_for_the_one_model_of_start_up(inference) -> None:
    app = inference(table=table(m=True, n=False))
    assert app("POST", "/invocations", b"model_name is no field of this").status == 200
    assert app("POST", "/invocations", b"model_name=n", {"Content-Type": FORM}).status == 200
    assert [call.model for call in app.backend.requests] == ["m", "n"]


@pytest.mark.parametrize("loaded", [{"m": False}, {"m": True, "n": True}, {}])
def test_an_invocation_that_could_be_for_any_model(inference, loaded: dict[str, bool]) -> None:
    app = inference(table=table(**loaded))
    for method in ("POST", "OPTIONS"):
        assert message(app(method, "/invocations", b'{"model_name": "m"}')) == NO_NAME
    assert app.backend.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/invocations/m",
        "/models",
        "/models/m",
        "/models/m/other",
        "/models/m/predict",
        "/models/predict",
        "/models/m/1.0/invoke",
        "/endpoints/m",
        "/endpoints/m/1.0/invocations",
        "/v1/models/m:predict/1.0",
        "/m/1.0/2.0/predict",
        "//m",
        "//predictions/m",
        "/wfpredict",
    ],
)
def test_unknown_routes_are_404(inference, path: str) -> None:
    app = inference()
    assert message(app("POST", path, b"x")) == NOT_FOUND
    assert app.backend.requests == []


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/predictions//m", ""),
        ("/v1/models/:predict", ""),
        ("/predictions/x/../m", "x"),
        ("/predictions/a+b", "a+b"),
        ("/models/none/invoke", "none"),
        ("/endpoints/none/invocations", "none"),
        ("/none/predict", "none"),
        ("/invocations?model_name=none", "none"),
    ],
)
def test_unknown_models_are_404(inference, path: str, model: str) -> None:
    assert message(inference()("POST", path)) == (404, "ModelNotFoundException", f"Model not found: {model}")


@pytest.mark.parametrize(
    "path",
    ["/predictions/m", "/m/predict", "/models/m/invoke", "/invocations?model_name=m", "/v1/models/m:predict"],
)
def test_every_way_without_a_version_goes_by_the_policy(inference, path: str) -> None:
    shares = {"1.0": 5000, "2.0": 5000}
    split = TrafficPolicy("weighted", shares, allocation=allocate(shares))
    rows = {version: VersionRoute(version, "ready", 1) for version in shares}

    async def respond(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(call.headers["x-request-priority"].encode(), version=app.backend.ref.version)

    app = inference(
        respond, table=RoutingTable(1, {"m": ModelRoute("1.0", rows, split)}, startup_complete=True)
    )
    app.compares = False  # the first version is random
    responses = [app("POST", path, b"x", {"x-request-priority": "high"}) for _ in range(40)]
    assert abs(sum(response["x-model-version"] == "2.0" for response in responses) - 20) <= 3
    assert {call.priority for call in app.backend.requests} == {"high"}
    late = app("POST", path, b"x", {"x-request-timeout-seconds": "0.000001"})
    assert late.status == 504


@pytest.mark.parametrize("path", ["/ping/predict", "/ping/1.0/predict"])
def test_the_first_segment_decides(inference, path: str) -> None:
    assert json.loads(inference()("GET", path).body) == {"status": "Healthy"}


@pytest.mark.parametrize(
    ("path", "requested", "reason"),
    [
        ("/models", False, None),
        ("/models/m", False, "model_not_found"),  # by management, which has none here
        ("/models/m/invoke", True, None),
        ("/endpoints/m/invocations", True, None),
        ("/v1/models/m", False, "model_not_found"),
        ("/v1/models/m:predict", True, None),
        ("/m/predict", True, None),
        ("/nothing", False, "no_route"),
    ],
)
def test_the_path_decides_where_one_port_has_both_apis(
    inference, path: str, requested: bool, reason: str | None
) -> None:
    app = inference(serve_management=True)
    response = app("GET", path, b"x")
    assert (len(app.backend.requests), response["x-torchrelay-reason"]) == (requested, reason)
