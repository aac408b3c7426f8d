"""Registration events as server-sent events, from a real event log."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from serve_app.control.lifecycle_events import EventLog
from serve_app.errors import ModelNotFound
from serve_app.protocols.management import model_events


@pytest.fixture
def app(management):
    """Return the management app over an event log; each entry of ``next`` is called when a client waits."""
    app = management()
    app.log = None
    app.next = []

    async def poll_events(
        model: str, registration: str | None, since: int | None, timeout: float
    ) -> list[Any]:
        if app.log is None:
            app.log = EventLog()
            app.history = app.log.open("m", "mine", version="1.0", url="m.mar")
        if not app.log.has_events(model, registration) and registration is None:
            raise ModelNotFound(model)
        if timeout and app.next:
            app.log.append(app.history, *app.next[0][:1], **app.next.pop(0)[1])
        return await app.log.wait_for_events(model, registration, since, min(timeout, 0.01))

    app.control_api.poll_events = poll_events
    return app


def read(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Event names and data; a comment is called ``""``."""
    found = []
    for block in body.decode().strip("\n").split("\n\n"):
        if block.startswith(":"):
            found.append(("", {}))
            continue
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        assert list(fields) == ["id", "event", "data"]
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_events_end_with_the_final_stage(app) -> None:
    app.next = [("installing", {"line": "Collecting a\nb"}), ("ready", {"workers": 1})]
    response = app("GET", "/models/m/events")
    assert (response.status, response["content-type"], response.ended) == (200, "text/event-stream", True)
    reported = read(response.body)
    assert [name for name, _ in reported] == ["accepted", "installing", "ready"]
    assert reported[0][1] | {"time": 0} == {
        "model": "m",
        "version": "1.0",
        "registration": "mine",
        "time": 0,
        "url": "m.mar",
    }
    assert reported[1][1]["line"] == "Collecting a\nb"


def test_a_failure_ends_it_with_its_traceback(app) -> None:
    app.next = [("failed", {"message": "no", "detail": "Traceback\n  ..."})]
    reported = read(app("GET", "/models/m/events?registration=mine").body)
    assert reported[-1][0] == "failed"
    assert reported[-1][1]["detail"] == "Traceback\n  ..."


def test_comment_is_sent_while_idle(app, monkeypatch) -> None:
    monkeypatch.setattr(model_events, "HEARTBEAT_INTERVAL_S", 0.001)
    waits = 0
    reported = app.control_api.poll_events

    async def late(*requested):
        nonlocal waits
        waits += requested[-1] > 0
        if waits == 3:
            app.next = [("ready", {})]
        return await reported(*requested)

    app.control_api.poll_events = late
    assert [name for name, _ in read(app("GET", "/models/m/events").body)] == ["accepted", "", "", "ready"]


@pytest.mark.parametrize("how", ["query", "header"])
def test_since_an_event(app, how) -> None:
    app.next = [("ready", {})]
    first = int(app("GET", "/models/m/events").body.split(b"\n")[0].removeprefix(b"id: "))
    response = (
        app("GET", f"/models/m/events?since={first}")
        if how == "query"
        else app("GET", "/models/m/events", headers={"Last-Event-ID": str(first)})
    )
    assert [name for name, _ in read(response.body)] == ["ready"]


def test_invalid_queries_are_refused(app) -> None:
    assert app("GET", "/models/none/events").status == 404
    for since in ("x", "-1", "%D9%A3", "1" * 19, "1" * 5000):
        assert app("GET", f"/models/m/events?since={since}").status == 400
    assert app("GET", "/models/m/events", headers={"Last-Event-ID": "1" * 5000}).status == 400
    assert app("DELETE", "/models/m/events").status == 404  # the version of that name


def test_unstarted_registration_ends_the_stream(app) -> None:
    response = app("GET", "/models/m/events?registration=none")
    assert (response.status, response.body, response.ended) == (200, b"", True)


def test_follow_continues_after_the_final_stage(app) -> None:
    app.next = [("ready", {}), ("failed", {})]
    received = threading.Event()
    reported = app.control_api.poll_events

    async def two_stories(*requested):
        if requested[-1] and not app.next:
            received.set()
            raise RuntimeError("the caller has seen enough")
        if requested[-1] and len(app.next) == 1:
            app.history = app.log.open("m", version="2.0")
        return await reported(*requested)

    app.control_api.poll_events = two_stories
    response = app("GET", "/models/m/events?follow=true", raises=True)
    assert [name for name, _ in read(response.body)] == ["accepted", "ready", "accepted", "failed"]
    assert received.is_set()


def test_disconnect_is_not_an_error(app) -> None:
    response = app("GET", "/models/m/events", disconnects=True)
    assert next(name for name, _ in read(response.body)) == "accepted"
    assert not response.ended
