"""How a model comes up, as server-sent events: a real story behind the door."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from serve_app.control.events import Events
from serve_app.doors.torchserve import events as door
from serve_app.errors import ModelNotFound


@pytest.fixture
def app(management):
    """The management app over a shelf that keeps stories; each entry of ``next`` is told when somebody waits."""
    app = management()
    app.log = None
    app.next = []

    async def events(model: str, registration: str | None, since: int | None, patience: float) -> list[Any]:
        if app.log is None:
            app.log = Events()
            app.story = app.log.begin("m", "mine", version="1.0", url="m.mar")
        if not app.log.knows(model, registration) and registration is None:
            raise ModelNotFound(model)
        if patience and app.next:
            app.log.put(app.story, *app.next[0][:1], **app.next.pop(0)[1])
        return await app.log.after(model, registration, since, min(patience, 0.01))

    app.shelf.events = events
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


def test_a_story_to_its_end(app) -> None:
    app.next = [("installing", {"line": "Collecting a\nb"}), ("ready", {"workers": 1})]
    answer = app("GET", "/models/m/events")
    assert (answer.status, answer["content-type"], answer.ended) == (200, "text/event-stream", True)
    told = read(answer.body)
    assert [name for name, _ in told] == ["accepted", "installing", "ready"]
    assert told[0][1] | {"time": 0} == {
        "model": "m",
        "version": "1.0",
        "registration": "mine",
        "time": 0,
        "url": "m.mar",
    }
    assert told[1][1]["line"] == "Collecting a\nb"


def test_a_failure_ends_it_with_its_traceback(app) -> None:
    app.next = [("failed", {"message": "no", "detail": "Traceback\n  ..."})]
    told = read(app("GET", "/models/m/events?registration=mine").body)
    assert told[-1][0] == "failed"
    assert told[-1][1]["detail"] == "Traceback\n  ..."


def test_silence_is_broken_by_a_comment(app, monkeypatch) -> None:
    monkeypatch.setattr(door, "HEARTBEAT", 0.001)
    waits = 0
    told = app.shelf.events

    async def late(*asked):
        nonlocal waits
        waits += asked[-1] > 0
        if waits == 3:
            app.next = [("ready", {})]
        return await told(*asked)

    app.shelf.events = late
    assert [name for name, _ in read(app("GET", "/models/m/events").body)] == ["accepted", "", "", "ready"]


@pytest.mark.parametrize("how", ["query", "header"])
def test_since_an_event(app, how) -> None:
    app.next = [("ready", {})]
    first = int(app("GET", "/models/m/events").body.split(b"\n")[0].removeprefix(b"id: "))
    answer = (
        app("GET", f"/models/m/events?since={first}")
        if how == "query"
        else app("GET", "/models/m/events", headers={"Last-Event-ID": str(first)})
    )
    assert [name for name, _ in read(answer.body)] == ["ready"]


def test_bad_questions(app) -> None:
    assert app("GET", "/models/none/events").status == 404
    assert app("GET", "/models/m/events?since=x").status == 400
    assert app("DELETE", "/models/m/events").status == 404  # the version of that name


def test_a_registration_that_never_begins_ends_the_answer(app) -> None:
    answer = app("GET", "/models/m/events?registration=none")
    assert (answer.status, answer.body, answer.ended) == (200, b"", True)


def test_a_follower_hears_what_comes_after_the_end(app) -> None:
    app.next = [("ready", {}), ("failed", {})]
    heard = threading.Event()
    told = app.shelf.events

    async def two_stories(*asked):
        if asked[-1] and not app.next:
            heard.set()
            raise RuntimeError("the caller has seen enough")
        if asked[-1] and len(app.next) == 1:
            app.story = app.log.begin("m", version="2.0")
        return await told(*asked)

    app.shelf.events = two_stories
    answer = app("GET", "/models/m/events?follow=true", raises=True)
    assert [name for name, _ in read(answer.body)] == ["accepted", "ready", "accepted", "failed"]
    assert heard.is_set()


def test_a_listener_that_leaves_is_no_fault(app) -> None:
    answer = app("GET", "/models/m/events", leaves=True)
    assert [name for name, _ in read(answer.body)][0] == "accepted"
    assert not answer.ended
