"""Authorization by keys, on the routes of every protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from serve_app.control.api import ControlPlane
from serve_app.domain.access import AccessTable, KeyGrant, Right
from serve_app.domain.model import ModelSpec
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http_app import inference_app, management_app, metrics_app
from serve_app.settings import AuthSettings, InferenceSettings, Settings

AUTHORIZATION = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
AUTHENTICATION = AUTHORIZATION.replace("Authorization", "Authentication")


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def access_of(**grants: KeyGrant) -> AccessTable:
    return AccessTable({digest(key): grant for key, grant in grants.items()})


def may(*rights: Right, models: tuple[str, ...] = ("*",), expires: float | None = None) -> KeyGrant:
    return KeyGrant(frozenset(rights), models, expires)


# Keys are called after what they may do.
ACCESS = access_of(
    infer=may("infer"),
    team=may("infer", models=("team-*", "shared")),
    observe=may("observe"),
    observe_team=may("observe", models=("team-*",)),
    management=may("observe", "manage"),
    manage_team=may("infer", "observe", "manage", models=("team-*",)),
    everything=may("infer", "observe", "manage"),
    API=may("token"),
    past=may("infer", "observe", "manage", "token", expires=time.time() - 1),
    future=may("infer", expires=time.time() + 3600),
)


MODEL = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})
TABLE = RoutingTable(1, dict.fromkeys(("m", "team-a", "shared"), MODEL), startup_complete=True)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def assert_refused(response: Any, reason: str, message: str = AUTHORIZATION) -> None:
    assert response.status == 400
    assert response["x-torchrelay-reason"] == reason
    assert response.body.decode() == (
        f'{{\n  "code": 400,\n  "type": "InvalidKeyException",\n  "message": "{message}"\n}}\n'
    )


@pytest.fixture
def locked(inference: Callable[..., Any]) -> Any:
    """Return the inference app over models m, team-a and shared."""
    return inference(table=replace(TABLE, access=ACCESS))


@pytest.fixture
def managed(management: Callable[..., Any]) -> Any:
    built = management(access=ACCESS)
    for name in ("m", "team-a", "team-b"):
        built.control_api.put(ModelSpec(name, "1.0", f"{name}.mar", "sha256", "archive"))
    return built


@pytest.mark.parametrize("path", ["/predictions/m", "/predictions/m/1.0", "/explanations/m"])
def test_inference_requires_a_key(locked: Any, path: str) -> None:
    assert locked("POST", path, b"hi", bearer("infer")).body == b"hi"
    assert locked("POST", path, b"hi", bearer("everything")).status == 200
    assert locked("POST", path, b"hi", bearer("future")).status == 200
    assert_refused(locked("POST", path, b"hi"), "missing_token")
    assert_refused(locked("POST", path, b"hi", bearer("guess")), "invalid_token")
    assert_refused(locked("POST", path, b"hi", bearer("past")), "expired_token")
    for key in ("management", "observe", "API"):
        assert_refused(locked("POST", path, b"hi", bearer(key)), "missing_permission")
    assert len(locked.backend.requests) == 3


@pytest.mark.parametrize(
    "value", ["bearer infer", "Basic infer", "infer", "Bearer", "Bearer a b", "Bearerinfer", ""]
)
def test_malformed_authorization_header_is_refused(locked: Any, value: str) -> None:
    assert_refused(locked("POST", "/predictions/m", b"hi", {"Authorization": value}), "invalid_token")


@pytest.mark.parametrize("value", ["Bearer infer", "Bearer   infer", "Bearer infer "])
def test_extra_spaces_are_accepted(locked: Any, value: str) -> None:
    assert locked("POST", "/predictions/m", b"hi", {"authorization": value}).status == 200


@pytest.mark.parametrize(("model", "ok"), [("team-a", True), ("shared", True), ("m", False), ("none", False)])
def test_key_is_limited_to_its_models(locked: Any, model: str, ok: bool) -> None:
    response = locked("POST", f"/predictions/{model}", b"hi", bearer("team"))
    if ok:
        assert response.status == 200
    else:
        assert_refused(response, "model_not_allowed")


def test_key_is_checked_before_the_body(locked: Any) -> None:
    assert_refused(locked("POST", "/predictions/m", [b"x" * 100_000] * 100, bearer("guess")), "invalid_token")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ping"),
        ("GET", "/health/live"),
        ("GET", "/health/ready"),
        ("GET", "/api-description"),
        ("OPTIONS", "/"),
        ("OPTIONS", "/predictions/m"),
    ],
)
def test_health_and_descriptions_need_no_key(locked: Any, method: str, path: str) -> None:
    assert locked(method, path).status == 200
    assert locked(method, path, b"", bearer("guess")).status == 200


def test_unknown_paths_require_a_key(locked: Any) -> None:
    """As with TorchServe, and so that a new route is never open by mistake."""
    assert_refused(locked("GET", "/nothing"), "missing_token")
    assert locked("GET", "/nothing", b"", bearer("infer")).status == 404


def test_key_is_hidden_from_handlers(locked: Any, inference: Callable[..., Any]) -> None:
    locked("POST", "/predictions/m", b"hi", {**bearer("infer"), "x-mine": "1"})
    headers = locked.backend.requests[0].headers
    assert "authorization" not in headers and headers["x-mine"] == "1"
    # Where none is wanted the header is the model's own affair.
    without = inference()
    without("POST", "/predictions/m", b"hi", bearer("anything"))
    assert without.backend.requests[0].headers["authorization"] == "Bearer anything"


def test_the_owner_of_a_key_is_the_salt_of_cached_prefixes(inference: Callable[..., Any]) -> None:
    grants = {name: replace(may("infer"), name=name) for name in ("first", "second")}
    isolated = replace(access_of(**grants), isolates_prefix_cache=True)
    for access, salts in ((isolated, ["first", "second"]), (access_of(**grants), ["other", None])):
        server = inference(table=replace(TABLE, access=access))
        server("POST", "/predictions/m", b"hi", {**bearer("first"), "cache_salt": "other"})
        server("POST", "/predictions/m", b"hi", bearer("second"))
        assert [request.headers.get("cache_salt") for request in server.backend.requests] == salts


def test_new_table_applies_to_the_next_request(inference: Callable[..., Any]) -> None:
    built = inference(table=TABLE)
    assert built("POST", "/predictions/m", b"hi").status == 200
    reader = built.reader
    reader.update(replace(TABLE, access=ACCESS))
    assert_refused(built("POST", "/predictions/m", b"hi"), "missing_token")
    reader.update(replace(TABLE, access=AccessTable({})))
    assert_refused(built("POST", "/predictions/m", b"hi", bearer("infer")), "invalid_token")


READS = [("GET", "/models"), ("GET", "/models/m"), ("GET", "/models/m/all"), ("GET", "/v1/models/m")]
WRITES = [
    ("POST", "/models?url=new.mar"),
    ("PUT", "/models/m?min_worker=1"),
    ("PUT", "/models/m/1.0/set-default"),
    ("DELETE", "/models/m"),
]


@pytest.mark.parametrize(("method", "target"), [*READS, *WRITES])
def test_management_requires_a_key(managed: Any, method: str, target: str) -> None:
    for key, reason in ((None, "missing_token"), ("guess", "invalid_token"), ("past", "expired_token")):
        assert_refused(managed(method, target, b"", bearer(key)), reason)
    for key in ("infer", "API"):
        assert_refused(managed(method, target, b"", bearer(key)), "missing_permission")
    if (method, target) in WRITES:
        assert_refused(managed(method, target, b"", bearer("observe")), "missing_permission")
    else:
        assert managed(method, target, b"", bearer("observe")).status == 200
    assert managed(method, target, b"", bearer("management")).status in (200, 202)


@pytest.mark.parametrize(("method", "target"), [*READS[1:], *WRITES[1:]])
def test_management_key_is_limited_to_its_models(managed: Any, method: str, target: str) -> None:
    assert_refused(managed(method, target, b"", bearer("manage_team")), "model_not_allowed")
    theirs = target.replace("models/m", "models/team-a")
    assert managed(method, theirs, b"", bearer("manage_team")).status in (200, 202)


def test_a_line_end_after_a_path_selects_no_route(managed: Any) -> None:
    response = managed("GET", "/token\n?type=inference", b"", bearer("observe"))
    assert (response.status, response["x-torchrelay-reason"]) == (404, "no_route")
    assert managed.control_api.operations == []


def test_list_contains_the_models_of_the_key(managed: Any) -> None:
    def listed(key: str, query: str = "") -> bytes:
        return managed("GET", f"/models{query}", b"", bearer(key)).body

    assert listed("observe").count(b"modelName") == 3
    assert listed("observe_team").count(b"team-") == 4  # two names, two URLs
    assert b'"m"' not in listed("observe_team")
    page = listed("observe_team", "?limit=1")
    assert b"team-a" in page and b"team-b" not in page
    assert b"team-b" in listed("observe_team", "?limit=1&next_page_token=1")


def test_registration_carries_the_allowed_models(managed: Any) -> None:
    """The name may stand in the archive, so it is compared where that is known."""
    managed("POST", "/models?url=team-c.mar", b"", bearer("manage_team"))
    managed("POST", "/models?url=any.mar", b"", bearer("management"))
    registrations = [
        requested[1] for requested in managed.control_api.operations if requested[0] == "register"
    ]
    assert [registration.allowed_models for registration in registrations] == [("team-*",), ("*",)]


def test_management_description_needs_no_key(managed: Any) -> None:
    for method, target in (("OPTIONS", "/"), ("GET", "/api-description"), ("OPTIONS", "/models/m")):
        assert managed(method, target).status == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("kind", ["inference", "management"])
def test_token_is_renewed(managed: Any, method: str, kind: str) -> None:
    response = managed(method, f"/token?type={kind}", b"", bearer("API"))
    assert (response.status, response.body, response["content-type"]) == (200, b"\n", "application/json")
    assert managed.control_api.operations == [("renew_key", kind)]


@pytest.mark.parametrize(
    ("key", "target", "reason"),
    [
        (None, "/token?type=inference", "missing_token"),
        ("guess", "/token?type=inference", "invalid_token"),
        ("past", "/token?type=inference", "expired_token"),
        ("management", "/token?type=inference", "missing_permission"),
        ("everything", "/token?type=inference", "missing_permission"),
        ("API", "/token", "wrong_type"),
        ("API", "/token?type=", "wrong_type"),
        ("API", "/token?type=Inference", "wrong_type"),
        ("API", "/token?type=API", "wrong_type"),
    ],
)
def test_token_renewal_is_refused(managed: Any, key: str | None, target: str, reason: str) -> None:
    assert_refused(managed("GET", target, b"", bearer(key)), reason, AUTHENTICATION)
    assert managed.control_api.operations == []


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "POST", "PUT", "DELETE"])
def test_no_method_makes_a_token_without_the_key(managed: Any, method: str) -> None:
    assert_refused(managed(method, "/token?type=inference"), "missing_token", AUTHENTICATION)
    assert managed.control_api.operations == []


PATHS = [
    "/models",
    "/models/m",
    "/models/m/1.0",
    "/models/m/1.0/set-default",
    "/models/m/events",
    "/v1/models/m",
]
ASKS = [
    "/predictions/m",
    "/explanations/m/1.0",
    "/invocations?model_name=m",
    "/models/m/invoke",
    "/endpoints/m/invocations",
    "/m/predict",
]


@pytest.mark.parametrize("path", [*PATHS, *ASKS, "/v1/models/m:predict", "/v2/models/m/explain"])
def test_options_needs_no_key_and_has_no_effect(managed: Any, locked: Any, path: str) -> None:
    managed("OPTIONS", path)
    locked("OPTIONS", path, b"hi")
    assert managed.control_api.operations == []
    assert locked.backend.requests == []


@pytest.mark.parametrize("path", [*ASKS, "/v1/models/m:predict", "/v2/models/m/explain"])
def test_every_inference_route_requires_a_key_for_its_model(locked: Any, path: str) -> None:
    assert_refused(locked("POST", path, b"hi"), "missing_token")
    assert_refused(locked("POST", path, b"hi", bearer("team")), "model_not_allowed")
    assert locked.backend.requests == []
    assert locked("POST", path, b"hi", bearer("infer")).status == 200


def test_token_requests_are_recognized_by_path_only(managed: Any) -> None:
    assert managed("GET", "/models", b"", {**bearer("observe"), "referer": "/token"}).status == 200
    assert managed("GET", "/token/?type=inference", b"", bearer("API")).status == 200
    assert_refused(managed("GET", "/tokens?type=inference", b"", bearer("API")), "missing_permission")
    assert_refused(managed("GET", "/token/x?type=inference", b"", bearer("API")), "missing_permission")


def test_without_keys_there_are_no_tokens(management: Callable[..., Any]) -> None:
    assert management()("GET", "/token?type=inference", b"", bearer("API")).status == 404


async def numbers(names: Any) -> bytes:
    return b"up 1\n"


@pytest.mark.parametrize("wanted", ["open", "observe"])
def test_metrics_are_open_unless_the_settings_say_otherwise(managed: Any, wanted: str) -> None:
    settings = Settings(auth=AuthSettings(metrics=wanted))  # type: ignore[arg-type]
    route = replace(managed, app=metrics_app(numbers, settings, lambda: ACCESS))
    assert route("GET", "/metrics", headers=bearer("observe")).body == b"up 1\n"
    open_to_all = replace(managed, app=metrics_app(numbers, settings, lambda: None))
    assert open_to_all("GET", "/metrics").body == b"up 1\n"
    without = route("GET", "/metrics")
    if wanted == "open":
        assert without.body == b"up 1\n"
    else:
        assert_refused(without, "missing_token")
        assert_refused(route("GET", "/metrics", headers=bearer("infer")), "missing_permission")
        assert_refused(route("GET", "/metrics", headers=bearer("observe_team")), "model_not_allowed")


@pytest.fixture
def together(locked: Any, managed: Any) -> Any:
    """All three APIs on the inference port."""
    settings = Settings(inference=InferenceSettings(serve_management=True))
    plane = locked.app._router._routers[0]._plane
    control = ControlPlane(managed.control_api, settings, lambda: ACCESS)
    return replace(managed, app=inference_app(plane, settings, locked.meters, None, control, numbers))


@pytest.mark.parametrize(
    ("method", "target", "key", "status"),
    [
        ("POST", "/predictions/m", "infer", 200),
        ("POST", "/predictions/m", "management", 400),
        ("GET", "/ping", None, 200),
        ("GET", "/models", "observe", 200),
        ("GET", "/models", "infer", 400),
        ("GET", "/models", None, 400),
        ("PUT", "/models/m?min_worker=1", "management", 202),
        ("GET", "/v1/models/m", "management", 200),
        ("GET", "/token?type=inference", "API", 200),
        ("GET", "/metrics", None, 200),
        ("OPTIONS", "/", None, 200),
        ("OPTIONS", "/models/m", None, 200),
        ("GET", "/nothing", "infer", 404),
        ("GET", "/nothing", None, 400),
    ],
)
def test_each_api_of_a_shared_port_requires_its_own_key(
    together: Any, method: str, target: str, key: str | None, status: int
) -> None:
    assert together(method, target, headers=bearer(key)).status == status


def test_a_shared_port_describes_both(together: Any, locked: Any) -> None:
    alone, both = (list(json.loads(app("OPTIONS", "/").body)["paths"]) for app in (locked, together))
    assert set(alone) < set(both)
    assert "/models/{model_name}" in both


def test_metrics_on_the_management_port(managed: Any) -> None:
    settings = Settings()
    control = ControlPlane(managed.control_api, settings, lambda: ACCESS)
    both = replace(managed, app=management_app(control, settings, render=numbers))
    assert both("GET", "/metrics").body == b"up 1\n"
    assert both("GET", "/models", headers=bearer("observe")).status == 200
    assert_refused(both("GET", "/nothing"), "missing_token")
