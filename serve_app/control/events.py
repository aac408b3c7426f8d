"""What happened to models on their way to being served: the last of it, in memory, and who waits for the next.

Each registration, and each change of a version's workers, has a story: events in order, under every
name by which a caller may know its model. A story has an end, ``ready`` or ``failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve_app.errors import RelayError
from serve_app.types import LAST_STAGES, Event, Stage

STORIES = 500  # in all; the oldest is forgotten first
_EVENTS = 200  # in each story, the last ones
_ENDED = 3600.0  # seconds for which a story that has ended is kept
_LONGEST = 20_000  # characters of what went wrong
_OFTEN = 0.1  # seconds between two events that only count on
_COUNTING = ("downloading", "unpacking")


@dataclass
class Story:
    id: str
    names: set[str]
    model: str
    version: str = ""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS))

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].stage in LAST_STAGES


class Events:
    """One process owns it: every method runs on that process's event loop."""

    def __init__(self) -> None:
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._last = 0
        self._heard = asyncio.Event()

    def begin(self, name: str, registration: str | None = None, version: str = "", **said: Any) -> Story:
        """A story of the model ``name``, with its first event; ``registration`` is the id that its caller chose."""
        self._forget()
        story = Story(registration or uuid.uuid4().hex, {name}, name, version)
        self._stories[story.id] = story
        self._stories.move_to_end(story.id)
        self.put(story, "accepted", **said)
        return story

    def named(self, story: Story, model: str, version: str) -> None:
        """The manifest has said what it is; it can be asked for under either name."""
        story.names.add(model)
        story.model, story.version = model, version

    def put(self, story: Story, stage: Stage, **said: Any) -> None:
        """The next event of a story that has not ended; one that only counts on takes the place of the one before."""
        if story.ended:
            return
        now = time.time()
        last = story.events[-1] if story.events else None
        if last is not None and last.stage == stage:
            if last.said == said:
                return
            if stage in _COUNTING:
                if now - last.time < _OFTEN and said.get("bytes") != said.get("total"):
                    return
                story.events.pop()
        if stage in _COUNTING and said.get("total"):
            said["percent"] = round(100 * said["bytes"] / said["total"], 1)
        self._last = max(self._last + 1, time.time_ns() // 1_000_000)
        story.events.append(Event(self._last, story.id, story.model, story.version, stage, now, said))
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()

    def teller(self, story: Story) -> Callable[..., None]:
        """``tell(stage, **said)``, from any thread."""
        loop = asyncio.get_running_loop()

        def tell(stage: Stage, **said: Any) -> None:
            loop.call_soon_threadsafe(partial(self.put, story, stage, **said))

        return tell

    @contextlib.contextmanager
    def told(self, story: Story) -> Iterator[None]:
        """What is raised in this block ends the story."""
        try:
            yield
        except BaseException as error:
            said = {"reason": "internal", "message": type(error).__name__}
            if isinstance(error, RelayError):
                said = {"reason": error.reason, "message": str(error)[:_LONGEST]}
                if detail := getattr(error, "detail", ""):
                    said["detail"] = detail[-_LONGEST:]
            self.put(story, "failed", **said)
            raise

    def of(self, model: str, version: str) -> Story | None:
        """The story of a version that has not ended yet."""
        for story in reversed(self._stories.values()):
            if (story.model, story.version) == (model, version):
                return None if story.ended else story
        return None

    def forget(self, story: Story) -> None:
        """Nothing came of it that anybody could ask for."""
        self._stories.pop(story.id, None)

    def knows(self, name: str, registration: str | None = None) -> bool:
        return any(True for _ in self._matching(name, registration))

    async def after(self, name: str, registration: str | None, since: int | None, patience: float) -> list[Event]:
        """A name's events after the one with id ``since``, as soon as there is one; none after ``patience`` seconds.

        Without ``since`` those of its last story; with ``registration`` of that one alone, which may be yet to begin.
        """
        until = time.monotonic() + patience
        while True:
            heard = self._heard
            stories = list(self._matching(name, registration))
            if since is None:
                found = list(stories[-1].events) if stories else []
            else:
                found = sorted((e for s in stories for e in s.events if e.id > since), key=lambda event: event.id)
            left = until - time.monotonic()
            if found or left <= 0:
                return found
            try:
                await asyncio.wait_for(heard.wait(), left)
            except asyncio.TimeoutError:
                return []

    def _matching(self, name: str, registration: str | None) -> Iterator[Story]:
        for story in self._stories.values():
            if name in story.names and registration in (None, story.id):
                yield story

    def _forget(self) -> None:
        long_ago = time.time() - _ENDED
        for story in [s for s in self._stories.values() if s.ended and s.events[-1].time < long_ago]:
            del self._stories[story.id]
        while len(self._stories) >= STORIES:
            self._stories.popitem(last=False)
