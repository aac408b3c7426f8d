"""The console of a real server in a browser: every page, with traffic, from registration to rollback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.console.conftest import Visitor
from tests.support.archives import make_archive
from tests.support.load import Trickle
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# It answers with scores, which depend on the version; an image or JSON.
SCORES = """
import torchrelay  # without it, input_type is not ours


class Handler:
    input_type = "image/*"

    def initialize(self, context):
        pass

    def handle(self, data, context):
        if {fails}:
            raise ValueError("<b>version 2.0 fails</b>")
        return [{{"{first}": 0.9, "other": 0.1}}] * len(data)
"""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000020000000208020000000fdd9ad80000001549444154789c63fcffff3f"
    "0303030303030303000015000301fbd2a4b90000000049454e44ae426082"
)
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def console(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Register two versions of ``scores``; 2.0 has another first label. Return the console's address."""
    folder = tmp_path_factory.mktemp("archives")
    for version, first in (("1.0", "cat"), ("2.0", "dog")):
        archive = make_archive(folder, "scores", SCORES.format(fails=False, first=first), version)
        assert server.register(archive).status_code == 200
    yield f"{server.process.management}/ui"
    for version in ("2.0", "1.0"):
        server.management.delete(f"/models/scores/{version}")


@pytest.fixture
def visitor(console: str, visit: Callable[..., Visitor]) -> Iterator[Visitor]:
    """Open a browser; in the end, its pages must have logged no error and contacted no other host."""
    visitor = visit(console)
    yield visitor
    assert not visitor.problems


def send(server: Server, count: int, body: bytes = PNG) -> None:
    for _ in range(count):
        server.http.post("/predictions/scores", content=body, headers={"content-type": "image/png"})


def test_the_first_visit_starts_the_console_and_shows_the_server(server: Server, visitor: Visitor) -> None:
    response = server.management.get("/ui")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    page = visitor.open("/")
    page.get_by_role("link", name="scores", exact=True).first.wait_for(timeout=WAIT_MS)
    with Trickle(f"{server.url}/predictions/scores", 2):
        rate = page.get_by_text("Requests/s", exact=True).locator("xpath=following-sibling::*")
        page.wait_for_function(
            "element => parseFloat(element.textContent) > 1", arg=rate.element_handle(), timeout=WAIT_MS
        )


def test_a_model_is_registered_scaled_and_removed(server: Server, visitor: Visitor, tmp_path: Path) -> None:
    archive = make_archive(server.store, "added", SCORES.format(fails=False, first="cat"))
    page = visitor.open("/")
    page.get_by_role("button", name="Register").click()
    page.get_by_label("Archive or URL").fill("absent.mar")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Register").click()
    page.get_by_text("Refused:").first.wait_for(timeout=WAIT_MS)
    page.get_by_label("Archive or URL").fill(archive.name)
    dialog.get_by_role("button", name="Register").click()
    page.get_by_role("link", name="added", exact=True).wait_for(timeout=WAIT_MS)
    page.get_by_role("link", name="added", exact=True).click()
    page.get_by_text("ready", exact=True).first.wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Scale").click()
    for bound in ("At least", "At most"):
        page.get_by_label(bound).fill("0")
    page.get_by_text("All replicas end").wait_for()
    page.get_by_role("button", name="Apply").click()
    server.wait(lambda: not server.workers("added"))
    page.get_by_text("Replicas: 0 ·").wait_for(timeout=WAIT_MS)
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    server.wait(lambda: server.management.get("/models/added").status_code == 404)


@pytest.mark.nightly
def test_an_image_is_tried(visitor: Visitor, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(PNG)
    page = visitor.open("/models/scores/try")
    page.get_by_label("Choose the image").set_input_files(image)
    page.get_by_role("img", name="The chosen file image.png").wait_for()
    page.get_by_role("button", name="Send").click()
    page.get_by_role("img", name="Scores: cat 0.900, other 0.100").wait_for()
    page.get_by_text("--data-binary @image.png").wait_for()
    for language, code in (("Python", "client.request('scores'"), ("JavaScript", "fetch(")):
        page.get_by_role("tab", name=language).click()
        page.get_by_text(code).wait_for()
    visitor.assert_accessible()


def test_a_slider_moves_the_traffic(server: Server, visitor: Visitor) -> None:
    page = visitor.open("/models/scores/traffic")
    slider = page.get_by_label("Weight of 1.0", exact=True)
    slider.wait_for()
    slider.press("PageDown")
    share = page.get_by_label("Weight of 2.0 in percent")
    share.fill("25")
    share.press("Tab")
    page.wait_for_function(
        "element => element.value === '75'",
        arg=page.get_by_label("Weight of 1.0 in percent").element_handle(),
    )
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("cell", name="25 %").wait_for()
    assert server.client.traffic("scores")["versions"] == {"1.0": 7500, "2.0": 2500}
    page.get_by_role("button", name="Reset to the default version").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    server.wait(lambda: not server.client.traffic("scores").get("versions"))


@pytest.mark.nightly
def test_a_disagreement_is_inspected(server: Server, visitor: Visitor) -> None:
    server.client.set_traffic("scores", {"shadow": {"version": "2.0", "compare": {"kind": "label"}}})
    send(server, 5)
    page = visitor.open("/models/scores/shadow")
    page.get_by_role("img", name="The input image").wait_for(timeout=WAIT_MS)
    page.get_by_text("0 %", exact=True).wait_for(timeout=WAIT_MS)
    page.get_by_text('"dog": 0.9').wait_for()
    visitor.assert_accessible()
    page.get_by_role("button", name="Delete the figures").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("no request has been compared yet").wait_for(timeout=WAIT_MS)
    server.client.reset_traffic("scores")


@pytest.mark.nightly
def test_an_experiment_is_followed_and_stopped(server: Server, visitor: Visitor) -> None:
    arms = {"old": {"version": "1.0", "weight": 5000}, "new": {"version": "2.0", "weight": 5000}}
    metrics = [{"name": "latency", "kind": "latency"}]
    document = {"name": "<i>labels</i>", "arms": arms, "metrics": metrics, "baseline": "old"}
    id = server.client.start_experiment("scores", document)["id"]
    send(server, 60)
    page = visitor.open("/experiments")
    page.get_by_role("link", name="<i>labels</i>").click()
    page.get_by_text("The arms' sizes fit their weights").wait_for(timeout=WAIT_MS)
    page.get_by_role("img", name="Difference of latency over time").wait_for()
    visitor.assert_accessible()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    server.wait(lambda: server.client.experiment(id)["state"] == "stopped")
    page.get_by_text("stopped", exact=True).wait_for()


@pytest.mark.nightly
def test_a_rollout_that_rolls_back_is_followed(server: Server, visitor: Visitor, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "scores", SCORES.format(fails=True, first="cat"), "3.0")
    assert server.register(archive).status_code == 200
    page = visitor.open("/models/scores/rollout")
    page.get_by_role("button", name="Start a rollout").click()
    page.get_by_label("New version", exact=True).click()
    page.get_by_role("option", name="3.0").click()
    page.get_by_label("Steps in percent").fill("50, 100")
    page.get_by_label("Seconds of each step").fill("1")
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    with Trickle(f"{server.url}/predictions/scores", 4):
        page.get_by_text("rolled back", exact=True).first.wait_for(timeout=WAIT_MS)
    page.get_by_role("cell", name="broken").first.wait_for()
    assert page.get_by_role("listitem").filter(has_text="error_rate").count()
    visitor.assert_accessible()
    page = visitor.open("/models/scores")
    page.get_by_role("heading", name="Version 3.0").wait_for(timeout=WAIT_MS)
    server.management.delete("/models/scores/3.0")


@pytest.mark.nightly
def test_workflows_async_predictions_events_and_logs(server: Server, visitor: Visitor) -> None:
    steps = {"first": {"model": "scores"}, "second": {"model": "scores", "inputs": "first"}}
    response = server.management.post("/workflows", json={"name": "twice", "steps": steps})
    assert response.status_code == 200, response.text
    server.http.post("/predictions/twice", json={"x": 1})
    page = visitor.open("/workflows")
    page.get_by_role("link", name="twice").click()
    page.get_by_role("img", name="Graph of the steps: first to second").wait_for(timeout=WAIT_MS)
    page.get_by_role("cell", name="the request").wait_for()

    id = server.client.submit_async("scores", json.dumps({"x": 1}), "application/json")["id"]
    server.wait(lambda: server.client.async_status(id)["state"] == "done")
    page = visitor.open("/async")
    row = page.get_by_role("row").filter(has_text=id)
    row.get_by_role("button", name="Open").click()
    page.get_by_role("dialog").get_by_text('"cat": 0.9').wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    row.wait_for(state="detached", timeout=WAIT_MS)

    page = visitor.open("/events")
    page.get_by_role("cell", name="ready", exact=True).first.wait_for()
    page.get_by_label("Stage").click()
    page.get_by_role("option", name="failed").click()
    page.get_by_role("cell", name="ready", exact=True).first.wait_for(state="detached")
    page.get_by_role("tab", name="Logs").click()
    page.get_by_label("Text").fill("deploying")
    page.get_by_role("cell", name="deploying").first.wait_for(timeout=WAIT_MS)
    page.get_by_role("tab", name="Changes").click()
    page.get_by_role("cell", name="register_workflow").first.wait_for(timeout=WAIT_MS)
    visitor.assert_accessible()
    server.management.delete("/workflows/twice")
