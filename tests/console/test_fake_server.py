"""The console in a browser, against a server in process: login, rights, escaping, many models, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, ReplicaInfo
from serve_app.errors import StartFailed
from tests.console.conftest import FakeServer, Visitor, running_console

pytestmark = pytest.mark.integration

ACCESS = AccessTable(
    {
        sha256(name.encode()).digest(): KeyGrant(frozenset(rights), name=name)
        for name, rights in (
            ("manager", ("infer", "observe", "manage")),
            ("watcher", ("observe",)),
            ("application", ("infer",)),
        )
    }
)
MARKUP = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>'


def add_model(server: FakeServer, name: str = "m", **status: Any) -> None:
    spec = ModelSpec(name, "1.0", f"{name}.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
    server.control_api.specs[name] = {"1.0": spec}
    server.control_api.defaults[name] = "1.0"
    worker = ReplicaInfo("r1", 4711, 1.0, True, 100 << 20, node="10.0.0.1")
    server.control_api.status[ModelRef(name, "1.0")] = ModelStatus("ready", 1, workers=(worker,), **status)

    async def list_models() -> list[tuple[str, str]]:
        return [(each, f"{each}.mar") for each in sorted(server.control_api.specs)]

    server.control_api.list_models = list_models  # type: ignore[method-assign]


def log_in(visitor: Visitor, key: str) -> Any:
    page = visitor.open("/login")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Log in").click()
    return page


@pytest.mark.slow
def test_login_keeps_the_key_out_of_the_browser(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server(access=ACCESS)
    add_model(server)
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin)
        page = visitor.page
        page.goto(origin + "/models/m")
        page.wait_for_url("**/login")
        page = log_in(visitor, "wrong")
        page.get_by_role("alert").get_by_text("Token").first.wait_for()
        visitor.assert_accessible()
        page = log_in(visitor, "manager")
        page.get_by_role("heading", name="Overview").wait_for()
        [cookie] = [each for each in page.context.cookies() if each["name"] == "torchrelay_session"]
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert "manager" not in page.evaluate(
            "JSON.stringify([localStorage, sessionStorage, document.cookie])"
        )
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login")
        page.goto(origin + "/")
        page.wait_for_url("**/login")


@pytest.mark.nightly
@pytest.mark.parametrize(("key", "sees"), [("watcher", True), ("application", False)])
def test_other_keys_are_read_only(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor], key: str, sees: bool
) -> None:
    server = fake_server(access=ACCESS)
    add_model(server)
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin)
        page = log_in(visitor, key)
        page.get_by_role("heading", name="Overview").wait_for()
        assert page.get_by_role("button", name="Register").is_disabled()
        visitor.open("/models/m")
        if sees:
            page.get_by_text("10.0.0.1").wait_for()
            assert page.get_by_role("button", name="Scale").is_disabled()
            assert page.get_by_role("button", name="Remove").is_disabled()
        else:
            page.get_by_role("alert").filter(has_text="The server refuses this").wait_for()
        assert {operation[0] for operation in server.control_api.operations} <= {"poll_events"}


@pytest.mark.slow
def test_a_ticket_is_good_once_and_other_sites_cannot_use_it(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server(access=ACCESS)
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin)
        tickets: list[str] = []
        visitor.page.on(
            "request",
            lambda request: "ticket=" in request.url and tickets.append(request.url.partition("ticket=")[2]),
        )
        log_in(visitor, "manager").get_by_role("heading", name="Overview").wait_for()
        [ticket] = tickets
        response = httpx.get(f"{origin}/session", params={"ticket": ticket}, timeout=60)
        assert "set-cookie" not in response.headers
        assert response.headers["location"] == "/login"


@pytest.mark.slow
def test_pages_of_other_sites_and_rebound_names_are_refused(
    fake_server: Callable[..., FakeServer],
) -> None:
    server = fake_server()
    with running_console(server.management, server.inference, server.management) as origin:
        refused = httpx.get(origin, headers={"host": "attacker.example"}, timeout=60)
        assert refused.status_code == 403
        response = httpx.get(origin, timeout=60)
        assert response.status_code == 200
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        address = origin.replace("http", "ws") + "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        with pytest.raises(InvalidStatus):
            connect(address, additional_headers={"Origin": "http://attacker.example"}, open_timeout=60)
        with connect(address, additional_headers={"Origin": origin}, open_timeout=60) as connection:
            assert connection.recv(60)


@pytest.mark.slow
def test_markup_in_names_and_logs_is_shown_as_text(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server, last_error=f"ValueError: {MARKUP}", error_time=2.0)

    async def list_audit_records(*_: Any) -> list[dict[str, Any]]:
        fields = dict.fromkeys(("actor", "address", "action", "subject", "result"), MARKUP)
        return [{"id": 1, "time": 3.0, "before": None, "after": None, **fields}]

    server.control_api.list_audit_records = list_audit_records  # type: ignore[method-assign]
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin)
        page = visitor.open("/models/m")
        page.get_by_text(MARKUP).wait_for()
        page = visitor.open("/events")
        page.get_by_role("tab", name="Changes").click()
        page.get_by_text(MARKUP).first.wait_for()
        assert page.evaluate("window.attacked") is None
        assert not visitor.problems


@pytest.mark.slow
def test_latencies_of_few_requests_are_exact(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server)
    for seconds in (0.212, 0.034, 0.012):
        server.meters.request("m", "1.0", "ok", seconds)
    with running_console(server.management, server.inference, server.management) as origin:
        row = visit(origin).open("/").get_by_role("row").filter(has_text="1.0")
        row.get_by_text("34.0 ms", exact=True).wait_for()
        row.get_by_text("212 ms", exact=True).wait_for()


@pytest.mark.nightly
def test_ten_thousand_models_are_paged_and_filtered(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    for number in range(10_000):
        add_model(server, f"model-{number:05}")
    with running_console(server.management, server.inference, server.management) as origin:
        page = visit(origin).open("/")
        page.get_by_text("1–50 of 10,000 models").wait_for(timeout=60_000)
        assert page.get_by_role("table").get_by_role("row").count() == 51
        page.get_by_role("button", name="Next").click()
        page.get_by_text("51–100 of 10,000 models").wait_for()
        page.get_by_label("Filter by name").fill("0123")
        page.get_by_text("1–11 of 11 models").wait_for()
        page.get_by_role("link", name="model-00123").click()
        page.get_by_role("heading", name="model-00123").wait_for()


@pytest.mark.nightly
def test_a_refused_change_is_shown_with_its_reason(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server)
    server.control_api.error = StartFailed("m", "1.0", "ImportError: no module named x")
    with running_console(server.management, server.inference, server.management) as origin:
        page = visit(origin).open("/models/m")
        page.get_by_role("button", name="Scale").click()
        page.get_by_label("At most").fill("2")
        page.get_by_text("follows the load between 1 and 2").wait_for()
        page.get_by_role("button", name="Apply").click()
        page.get_by_text("ImportError: no module named x").first.wait_for()
        [scaled] = [each for each in server.control_api.operations if each[0] == "scale"]
        assert scaled[:5] == ("scale", "m", "1.0", 1, 2)


@pytest.mark.nightly
def test_a_server_that_does_not_respond_is_named_until_it_does(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server)
    with running_console("http://127.0.0.1:9", server.inference, server.management) as origin:
        page = visit(origin).page
        page.goto(origin)
        page.get_by_text("http://127.0.0.1:9 does not respond").wait_for()
        assert page.get_by_role("button", name="Try again").is_visible()


@pytest.mark.nightly
def test_an_open_page_shows_that_the_console_is_gone_and_connects_again(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server)
    first = running_console(server.management, server.inference, server.management)
    origin = first.__enter__()
    page = visit(origin).open("/models/m")
    page.get_by_text("10.0.0.1").wait_for()
    first.__exit__(None, None, None)
    page.get_by_text("Connection lost").wait_for()
    port = int(origin.rpartition(":")[2])
    with running_console(server.management, server.inference, server.management, port):
        page.wait_for_function("window.socket && window.socket.connected", timeout=30_000)
        page.get_by_text("10.0.0.1").wait_for(timeout=30_000)
        assert not page.get_by_text("Connection lost").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.nightly
def test_every_page_is_accessible_and_fits_a_phone(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor], scheme: str
) -> None:
    server = fake_server()
    add_model(server, last_error="ValueError: a cause", error_time=2.0)
    sections = ("", "/try", "/traffic", "/experiments", "/rollout", "/shadow")
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin, color_scheme=scheme)
        for path in ("/", "/experiments", "/async", "/events", *(f"/models/m{each}" for each in sections)):
            page = visitor.open(path)
            page.get_by_role("heading", level=1).wait_for()
            page.wait_for_timeout(300)
            visitor.assert_accessible()
            page.set_viewport_size({"width": 400, "height": 800})
            page.wait_for_function("document.documentElement.scrollWidth <= 400")
            page.set_viewport_size({"width": 1200, "height": 900})


@pytest.mark.nightly
def test_swagger_ui_shows_the_api_of_both_ports(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    for origin, operation in (
        (server.management, "/models/{model_name}/traffic"),
        (server.inference, "/ping"),
    ):
        visitor = visit(origin)
        visitor.page.goto(f"{origin}/docs")
        visitor.page.locator(f"[data-path='{operation}']").first.wait_for(timeout=60_000)
        assert not visitor.problems


@pytest.mark.nightly
def test_keyboard_alone_reaches_the_model(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    add_model(server)
    with running_console(server.management, server.inference, server.management) as origin:
        page = visit(origin).open("/")
        page.get_by_role("link", name="m", exact=True).wait_for()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "m":
                break
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="m", exact=True).wait_for()


@pytest.mark.slow
def test_the_first_steps_begin_with_a_registration_and_end_with_an_experiment(
    fake_server: Callable[..., FakeServer], visit: Callable[..., Visitor]
) -> None:
    server = fake_server()
    with running_console(server.management, server.inference, server.management) as origin:
        visitor = visit(origin)
        page = visitor.open("/")
        steps = page.get_by_role("region", name="First steps")
        steps.get_by_text("torchrelay models register ./model.mar").wait_for()
        steps.get_by_role("button", name="Add a model").click()
        page.get_by_label("Archive or URL").wait_for()
        add_model(server)
        visitor.open("/")
        steps.get_by_text(f"curl {server.inference}/predictions/m").wait_for()
        steps.get_by_text("register a second version of m").wait_for()
        server.control_api.specs["m"]["2.0"] = replace(server.control_api.specs["m"]["1.0"], version="2.0")
        server.control_api.status[ModelRef("m", "2.0")] = ModelStatus("ready", 0)
        visitor.open("/")
        steps.get_by_text(f"curl -X POST {server.management}/models/m/experiments").wait_for()
        visitor.assert_accessible()
        steps.get_by_role("link", name="Try it in a form").click()
        page.get_by_role("button", name="Send").wait_for()
        visitor.open("/")
        steps.get_by_role("button", name="Hide").click()
        steps.wait_for(state="hidden")
        assert not visitor.problems
