"""Requests that browsers send for pages of other sites, on each port."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.domain.access import AccessTable
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.net.request_origin import CrossSitePolicy, CrossSiteRequest, HostNotAllowed
from serve_app.protocols.http_app import metrics_app
from serve_app.settings import Settings, load

FOREIGN = {"Origin": "https://elsewhere.example", "Host": "127.0.0.1:8081"}
OWN = {"Origin": "http://127.0.0.1:8081", "Host": "127.0.0.1:8081", "Sec-Fetch-Site": "same-origin"}
MARKED = {"Sec-Fetch-Site": "cross-site"}
ROUTES = {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})}


async def echo(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(request.inputs[0].value if request.inputs else b"", version="1.0")


def answer(response: Any) -> tuple[int, str | None]:
    return response.status, response["x-torchrelay-reason"]


@pytest.mark.parametrize("headers", [FOREIGN, MARKED, {"Origin": "null"}, {"Origin": ""}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/models?url=m.mar"),
        ("PUT", "/models/m?min_worker=0"),
        ("DELETE", "/models/m"),
        ("PUT", "/models/m/traffic"),
        ("GET", "/token?type=management"),
        ("POST", "/nothing"),
    ],
)
def test_management_refuses_changes_of_other_sites(
    management: Any, method: str, path: str, headers: dict[str, str]
) -> None:
    app = management()
    assert answer(app(method, path, b"", headers)) == (403, "cross_site")
    assert not app.control_api.operations


@pytest.mark.parametrize("headers", [OWN, {}, {"Host": "localhost:8081"}, {"Sec-Fetch-Site": "none"}])
def test_management_accepts_its_own_pages_and_other_clients(management: Any, headers: dict[str, str]) -> None:
    assert management()("POST", "/models?url=m-1.0.mar", b"", headers).status == 200


def test_management_answers_reading_requests_of_other_sites(management: Any) -> None:
    for method, path in (("GET", "/models"), ("HEAD", "/openapi.json"), ("OPTIONS", "/")):
        assert management()(method, path, b"", FOREIGN).status in (200, 405)


def test_cors_origin_of_inference_is_foreign_to_management(management: Any, inference: Any) -> None:
    settings = {"cors_allowed_origin": "https://elsewhere.example"}
    assert answer(management(**settings)("POST", "/models?url=m.mar", b"", FOREIGN)) == (403, "cross_site")
    shared = inference(serve_management=True, **settings)
    assert answer(shared("POST", "/models?url=m-1.0.mar", b"", FOREIGN)) == (403, "cross_site")
    assert shared("POST", "/models?url=m-1.0.mar").status == 200


HOSTS = [
    ("127.0.0.1:8081", True),
    ("[::1]:8081", True),
    ("localhost", True),
    ("LocalHost.:8081", True),
    ("app.localhost:8081", True),
    ("elsewhere.example:8081", False),
    ("127.0.0.1.elsewhere.example", False),
    ("localhost.elsewhere.example", False),
    ("10.0.0.1:8081", False),
    ("", False),
]


@pytest.mark.parametrize(("host", "known"), HOSTS)
def test_without_keys_management_accepts_only_loopback_names(management: Any, host: str, known: bool) -> None:
    expected = (200, None) if known else (403, "host_not_allowed")
    for path in ("/models", "/openapi.json"):
        assert answer(management()("GET", path, b"", {"Host": host})) == expected


def test_with_keys_management_accepts_any_host(management: Any) -> None:
    response = management(access=AccessTable({}))("GET", "/models", b"", {"Host": "elsewhere.example"})
    assert answer(response) == (400, "missing_token")


@pytest.mark.parametrize(("host", "known"), HOSTS)
def test_inference_port_of_the_loopback_checks_the_host(inference: Any, host: str, known: bool) -> None:
    app = inference(echo, RoutingTable(1, ROUTES, startup_complete=True, on_loopback=True))
    expected = (200, None) if known else (403, "host_not_allowed")
    for method, path in (("POST", "/predictions/m"), ("GET", "/openapi.json"), ("GET", "/ping")):
        assert answer(app(method, path, b"", {"Host": host})) == expected


def test_inference_port_elsewhere_accepts_any_host_or_the_allowed_ones(inference: Any) -> None:
    host = {"Host": "models.example:8080"}
    assert inference(echo)("POST", "/predictions/m", b"", host).status == 200
    app = inference(echo, allowed_hosts=("*.example",))
    assert app("POST", "/predictions/m", b"", host).status == 200
    refused = app("POST", "/predictions/m", b"", {"Host": "elsewhere.org"})
    assert answer(refused) == (403, "host_not_allowed")
    assert b"inference.allowed_hosts" in refused.body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/predictions/m"),
        ("POST", "/%70redictions/m"),
        ("GET", "/predictions/m?data=1"),
        ("POST", "/invocations"),
        ("POST", "/explanations/m"),
        ("POST", "/models/m/invoke"),
        ("GET", "/endpoints/m/invocations"),
        ("POST", "/v1/models/m:predict"),
        ("GET", "/m/predict"),
        ("POST", "/v2/models/m/infer"),
        ("POST", "/v2/repository/models/m/load"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/experiments/e/events"),
    ],
)
def test_inference_refuses_requests_of_other_sites(inference: Any, method: str, path: str) -> None:
    app = inference(echo)
    form = {**FOREIGN, "Content-Type": "text/plain"}
    for headers in (form, MARKED):
        response = app(method, path, b"x", headers)
        assert (response.status, response["x-torchrelay-reason"]) == (403, "cross_site")
    assert not app.backend.requests


SAME_SITE = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Host": "localhost:8080"}
OTHER_PORT = {**SAME_SITE, "Referer": "http://localhost:3000/page"}


@pytest.mark.parametrize("headers", [SAME_SITE, OTHER_PORT])
@pytest.mark.parametrize("path", ["/predictions/m?data=1", "/explanations/m", "/m/predict"])
def test_an_image_of_another_port_of_this_host_runs_no_model(
    inference: Any, headers: dict[str, str], path: str
) -> None:
    """A browser sends no Origin with it, and the ports of a host are one site."""
    app = inference(echo)
    assert answer(app("GET", path, b"", headers)) == (403, "cross_site")
    assert not app.backend.requests


def test_an_image_of_another_port_makes_no_key(management: Any) -> None:
    assert answer(management()("GET", "/token?type=management", b"", OTHER_PORT)) == (403, "cross_site")


def test_an_image_of_an_allowed_page_of_this_host_is_served(inference: Any) -> None:
    app = inference(echo, cors_allowed_origin="http://localhost:3000")
    assert app("GET", "/predictions/m?data=1", b"", OTHER_PORT).status == 200
    assert answer(app("GET", "/predictions/m?data=1", b"", SAME_SITE)) == (403, "cross_site")
    for site in ("same-origin", "none"):
        assert inference(echo)("GET", "/predictions/m?data=1", b"", {"Sec-Fetch-Site": site}).status == 200


def test_inference_accepts_its_own_page_and_the_origin_of_cors(inference: Any) -> None:
    own = {"Origin": "https://models.example", "Host": "models.example", "Sec-Fetch-Site": "same-origin"}
    assert inference(echo)("POST", "/predictions/m", b"x", own).status == 200
    for allowed in ("https://elsewhere.example", "*"):
        app = inference(echo, cors_allowed_origin=allowed)
        headers = {**FOREIGN, **MARKED}
        assert app("POST", "/predictions/m", b"x", headers)["access-control-allow-origin"] == allowed
        preflight = {**headers, "Access-Control-Request-Method": "POST"}
        assert app("OPTIONS", "/predictions/m", b"", preflight).status == 200


def test_page_of_an_allowed_host_behind_a_proxy_is_the_servers_own(inference: Any) -> None:
    app = inference(echo, allowed_hosts=("models.example",))
    headers = {"Origin": "https://models.example", "Host": "127.0.0.1:8080"}
    assert app("POST", "/predictions/m", b"x", headers).status == 200


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 403), ("0.0.0.0", 200)])
def test_metrics_port_of_the_loopback_checks_the_host(address: str, status: int) -> None:
    async def render(names: object) -> bytes:
        return b""

    async def ask(settings: Settings) -> int:
        transport = httpx.ASGITransport(metrics_app(render, settings, lambda: None))
        async with httpx.AsyncClient(transport=transport, base_url="http://elsewhere.example") as client:
            return (await client.get("/metrics")).status_code

    assert asyncio.run(ask(load({"management": {"metrics_host": address}}))) == status


def test_addresses_are_names_of_a_port_that_is_not_the_loopbacks() -> None:
    policy = CrossSitePolicy("management", (), lambda: True, bound_host="0.0.0.0")
    policy.check("GET", "/", {"host": "192.0.2.1:8081"})
    with pytest.raises(HostNotAllowed):
        policy.check("GET", "/", {"host": "elsewhere.example:8081"})


def test_errors_name_the_setting() -> None:
    policy = CrossSitePolicy("management", (), lambda: True)
    with pytest.raises(CrossSiteRequest, match=r"elsewhere\.example.*management\.allowed_hosts"):
        policy.check("POST", "/", {"origin": "https://elsewhere.example"})
