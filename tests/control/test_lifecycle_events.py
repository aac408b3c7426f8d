"""Lifecycle events of models: which are sent, who receives them, and how many are kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.control import lifecycle_events
from serve_app.control.lifecycle_events import EventLog
from serve_app.errors import StartFailed


def run(test: Callable[[EventLog], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(EventLog()), 60)

    asyncio.run(main())


async def reported(
    log: EventLog, name: str = "m", registration: str | None = None, since: int | None = None
) -> list[str]:
    return [event.stage for event in await log.wait_for_events(name, registration, since, 0)]


def test_a_story_from_its_beginning_to_its_end() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m", url="m.mar")
        log.append(history, "checking")
        log.set_model(history, "m", "2.0")
        log.append(history, "ready", workers=1)
        found = await log.wait_for_events("m", None, None, 0)
        assert [(e.stage, e.version, e.details) for e in found] == [
            ("accepted", "", {"url": "m.mar"}),
            ("checking", "", {}),
            ("ready", "2.0", {"workers": 1}),
        ]
        assert [e.id for e in found] == sorted({e.id for e in found})
        assert abs(found[0].time - time.time()) < 10
        assert found[0].id > (time.time() - 10) * 1000  # also after a restart higher than all before it

    run(test)


def test_since_an_event_only_what_came_after_it() -> None:
    async def test(log: EventLog) -> None:
        log.append(log.open("m"), "ready")
        log.append(log.open("other"), "ready")
        second = log.open("m")
        everything = await log.wait_for_events("m", None, 0, 0)
        assert [e.stage for e in everything] == ["accepted", "ready", "accepted"]
        assert await reported(log, since=everything[1].id) == ["accepted"]
        assert await reported(log) == ["accepted"]  # without it: of the last history
        assert await reported(log, registration=second.id) == ["accepted"]
        assert await reported(log, since=everything[-1].id) == []

    run(test)


def test_a_listener_waits_for_what_comes_next_and_for_a_registration_that_is_yet_to_begin() -> None:
    async def test(log: EventLog) -> None:
        waiting = [asyncio.create_task(log.wait_for_events("m", "mine", None, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        log.open("m", "another")
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        log.open("m", "mine")
        for received in await asyncio.gather(*waiting):
            assert [(e.stage, e.registration) for e in received] == [("accepted", "mine")]
        assert await log.wait_for_events("m", "mine", received[-1].id, 0.01) == []

    run(test)


def test_a_story_is_known_by_both_of_its_names() -> None:
    async def test(log: EventLog) -> None:
        log.set_model(log.open("file"), "m", "1.0")
        assert log.has_events("file")
        assert log.has_events("m")
        assert not log.has_events("none")
        assert await reported(log, "m") == await reported(log, "file") == ["accepted"]

    run(test)


def test_what_only_counts_on_takes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m")
        monkeypatch.setattr(lifecycle_events, "_MIN_PROGRESS_INTERVAL", 0)
        for done in range(0, 101, 10):
            log.append(history, "downloading", bytes=done, total=100)
        log.append(history, "checking")
        found = await log.wait_for_events("m", None, None, 0)
        assert [e.stage for e in found] == ["accepted", "downloading", "checking"]
        assert found[1].details == {"bytes": 100, "total": 100, "percent": 100.0}
        log.append(history, "loading")
        log.append(history, "loading")
        assert (await reported(log))[-2:] == ["checking", "loading"]

    run(test)


def test_fast_progress_is_reported_at_intervals() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m")
        for done in range(1000):
            log.append(history, "downloading", bytes=done, total=None)
        first = (await log.wait_for_events("m", None, None, 0))[-1]
        assert first.details["bytes"] < 1000
        assert "percent" not in first.details

    run(test)


def test_lines_are_kept_as_far_as_there_is_room() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m")
        for line in range(1000):
            log.append(history, "installing", line=str(line))
        found = await log.wait_for_events("m", None, None, 0)
        assert len(found) == 200
        assert found[-1].details == {"line": "999"}

    run(test)


def test_stories_are_forgotten_by_number_and_by_age() -> None:
    async def test(log: EventLog) -> None:
        for number in range(lifecycle_events.MAX_HISTORIES + 10):
            log.open(f"m{number}")
        assert not log.has_events("m9")
        assert log.has_events("m10")

    run(test)


def test_a_story_that_ended_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: EventLog) -> None:
        log.append(log.open("ended"), "ready")
        log.open("not-ended")
        monkeypatch.setattr(lifecycle_events, "_RETENTION_S", -1)
        log.open("new")
        assert not log.has_events("ended")
        assert log.has_events("not-ended")

    run(test)


def test_a_replicas_word_belongs_to_the_story_that_goes_on() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m", version="1.0")
        assert log.find_unfinished("m", "1.0") is history
        assert log.find_unfinished("m", "2.0") is None
        log.append(history, "ready")
        assert log.find_unfinished("m", "1.0") is None

    run(test)


def test_a_story_has_one_end() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m")
        log.append(history, "failed", reason="removed")
        log.append(history, "ready")
        assert await reported(log) == ["accepted", "failed"]

    run(test)


def test_what_is_raised_ends_a_story_with_its_traceback() -> None:
    async def test(log: EventLog) -> None:
        with pytest.raises(StartFailed), log.record_failure(log.open("m")):
            raise StartFailed("m", "1.0", "Traceback ...")
        [_, failed] = await log.wait_for_events("m", None, None, 0)
        assert failed.stage == "failed"
        assert failed.details == {
            "reason": "start_failed",
            "message": "Failed to start workers for model m version: 1.0",
            "detail": "Traceback ...",
        }
        with pytest.raises(ZeroDivisionError), log.record_failure(log.open("m")):
            raise ZeroDivisionError("secret")
        assert (await log.wait_for_events("m", None, None, 0))[-1].details == {
            "reason": "internal",
            "message": "ZeroDivisionError",
        }

    run(test)


def test_another_thread_tells_in_order() -> None:
    async def test(log: EventLog) -> None:
        history = log.open("m")
        tell = log.progress_callback(history)
        thread = threading.Thread(target=lambda: [tell("installing", line=str(n)) for n in range(50)])
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        assert [e.details["line"] for e in (await log.wait_for_events("m", None, None, 0))[1:]] == [
            str(n) for n in range(50)
        ]

    run(test)
