"""What is told of models on their way, who hears it, and how little of it is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.control import events
from serve_app.control.events import Events
from serve_app.errors import StartFailed


def run(test: Callable[[Events], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Events()), 60)

    asyncio.run(main())


async def told(log: Events, name: str = "m", registration: str | None = None, since: int | None = None) -> list[str]:
    return [event.stage for event in await log.after(name, registration, since, 0)]


def test_a_story_from_its_beginning_to_its_end() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m", url="m.mar")
        log.put(story, "checking")
        log.named(story, "m", "2.0")
        log.put(story, "ready", workers=1)
        found = await log.after("m", None, None, 0)
        assert [(e.stage, e.version, e.said) for e in found] == [
            ("accepted", "", {"url": "m.mar"}),
            ("checking", "", {}),
            ("ready", "2.0", {"workers": 1}),
        ]
        assert [e.id for e in found] == sorted({e.id for e in found})
        assert abs(found[0].time - time.time()) < 10
        assert found[0].id > (time.time() - 10) * 1000  # also after a restart higher than all before it

    run(test)


def test_since_an_event_only_what_came_after_it() -> None:
    async def test(log: Events) -> None:
        log.put(log.begin("m"), "ready")
        log.put(log.begin("other"), "ready")
        second = log.begin("m")
        everything = await log.after("m", None, 0, 0)
        assert [e.stage for e in everything] == ["accepted", "ready", "accepted"]
        assert await told(log, since=everything[1].id) == ["accepted"]
        assert await told(log) == ["accepted"]  # without it: of the last story
        assert await told(log, registration=second.id) == ["accepted"]
        assert await told(log, since=everything[-1].id) == []

    run(test)


def test_a_listener_waits_for_what_comes_next_and_for_a_registration_that_is_yet_to_begin() -> None:
    async def test(log: Events) -> None:
        waiting = [asyncio.create_task(log.after("m", "mine", None, 5)) for _ in range(3)]
        await asyncio.sleep(0)
        log.begin("m", "another")
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        log.begin("m", "mine")
        for heard in await asyncio.gather(*waiting):
            assert [(e.stage, e.registration) for e in heard] == [("accepted", "mine")]
        assert await log.after("m", "mine", heard[-1].id, 0.01) == []

    run(test)


def test_a_story_is_known_by_both_of_its_names() -> None:
    async def test(log: Events) -> None:
        log.named(log.begin("file"), "m", "1.0")
        assert log.knows("file")
        assert log.knows("m")
        assert not log.knows("none")
        assert await told(log, "m") == await told(log, "file") == ["accepted"]

    run(test)


def test_what_only_counts_on_takes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Events) -> None:
        story = log.begin("m")
        monkeypatch.setattr(events, "_OFTEN", 0)
        for done in range(0, 101, 10):
            log.put(story, "downloading", bytes=done, total=100)
        log.put(story, "checking")
        found = await log.after("m", None, None, 0)
        assert [e.stage for e in found] == ["accepted", "downloading", "checking"]
        assert found[1].said == {"bytes": 100, "total": 100, "percent": 100.0}
        log.put(story, "loading")
        log.put(story, "loading")
        assert (await told(log))[-2:] == ["checking", "loading"]

    run(test)


def test_what_counts_quickly_is_not_told_each_time() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m")
        for done in range(1000):
            log.put(story, "downloading", bytes=done, total=None)
        first = (await log.after("m", None, None, 0))[-1]
        assert first.said["bytes"] < 1000
        assert "percent" not in first.said

    run(test)


def test_lines_are_kept_as_far_as_there_is_room() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m")
        for line in range(1000):
            log.put(story, "installing", line=str(line))
        found = await log.after("m", None, None, 0)
        assert len(found) == 200
        assert found[-1].said == {"line": "999"}

    run(test)


def test_stories_are_forgotten_by_number_and_by_age() -> None:
    async def test(log: Events) -> None:
        for number in range(events.STORIES + 10):
            log.begin(f"m{number}")
        assert not log.knows("m9")
        assert log.knows("m10")

    run(test)


def test_a_story_that_ended_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(log: Events) -> None:
        log.put(log.begin("ended"), "ready")
        log.begin("not-ended")
        monkeypatch.setattr(events, "_ENDED", -1)
        log.begin("new")
        assert not log.knows("ended")
        assert log.knows("not-ended")

    run(test)


def test_a_replicas_word_belongs_to_the_story_that_goes_on() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m", version="1.0")
        assert log.of("m", "1.0") is story
        assert log.of("m", "2.0") is None
        log.put(story, "ready")
        assert log.of("m", "1.0") is None

    run(test)


def test_a_story_has_one_end() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m")
        log.put(story, "failed", reason="removed")
        log.put(story, "ready")
        assert await told(log) == ["accepted", "failed"]

    run(test)


def test_what_is_raised_ends_a_story_with_its_traceback() -> None:
    async def test(log: Events) -> None:
        with pytest.raises(StartFailed), log.told(log.begin("m")):
            raise StartFailed("m", "1.0", "Traceback ...")
        [_, failed] = await log.after("m", None, None, 0)
        assert failed.stage == "failed"
        assert failed.said == {
            "reason": "start_failed",
            "message": "Failed to start workers for model m version: 1.0",
            "detail": "Traceback ...",
        }
        with pytest.raises(ZeroDivisionError), log.told(log.begin("m")):
            raise ZeroDivisionError("secret")
        assert (await log.after("m", None, None, 0))[-1].said == {"reason": "internal", "message": "ZeroDivisionError"}

    run(test)


def test_another_thread_tells_in_order() -> None:
    async def test(log: Events) -> None:
        story = log.begin("m")
        tell = log.teller(story)
        thread = threading.Thread(target=lambda: [tell("installing", line=str(n)) for n in range(50)])
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        assert [e.said["line"] for e in (await log.after("m", None, None, 0))[1:]] == [str(n) for n in range(50)]

    run(test)
