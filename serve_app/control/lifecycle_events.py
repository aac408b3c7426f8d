"""Lifecycle events of models on their way to being served: the latest ones, in memory, and their waiters.

Each registration, and each scaling of a version, has a history: events in order, found by every name under
which a caller may know the model. A history ends with ``ready`` or ``failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve_app.domain.access import matches
from serve_app.domain.model import FINAL_STAGES, EventQuery, ModelEvent, ModelRef, Stage
from serve_app.errors import RelayError

MAX_HISTORIES = 500  # the oldest is dropped first
_MAX_EVENTS = 200  # in each history, the last ones
_RETENTION_S = 3600.0  # seconds for which a finished history is kept
_MAX_ERROR_LENGTH = 20_000  # characters of an error's message or detail
_MIN_PROGRESS_INTERVAL = 0.1  # seconds between two progress events
_PROGRESS_STAGES = ("downloading", "unpacking")


@dataclass
class EventHistory:
    """The events of one registration or scaling."""

    id: str
    names: set[str]
    model: str
    version: str = ""
    events: deque[ModelEvent] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))

    @property
    def finished(self) -> bool:
        return bool(self.events) and self.events[-1].stage in FINAL_STAGES


class EventLog:
    """The histories of all models. Every method runs on the event loop of the process that owns it."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, EventHistory] = OrderedDict()
        self._last_id = 0
        self._event_added = asyncio.Event()

    def open(
        self, name: str, registration: str | None = None, version: str = "", **details: Any
    ) -> EventHistory:
        """Open a history of the model ``name`` with its first event.

        ``registration`` is the id that the caller chose.
        """
        self._drop_old()
        history = EventHistory(registration or uuid.uuid4().hex, {name}, name, version)
        self._histories[history.id] = history
        self._histories.move_to_end(history.id)
        self.append(history, "accepted", **details)
        return history

    def set_model(self, history: EventHistory, model: str, version: str) -> None:
        """Add the name that the manifest declares; the history is found by both names."""
        history.names.add(model)
        history.model, history.version = model, version

    def append(self, history: EventHistory, stage: Stage, **details: Any) -> None:
        """Append an event to an unfinished history; a progress event replaces the one before it."""
        if history.finished:
            return
        now = time.time()
        last = history.events[-1] if history.events else None
        if last is not None and last.stage == stage:
            if last.details == details:
                return
            if stage in _PROGRESS_STAGES:
                is_complete = details.get("bytes") == details.get("total")
                if now - last.time < _MIN_PROGRESS_INTERVAL and not is_complete:
                    return
                history.events.pop()
        if stage in _PROGRESS_STAGES and details.get("total"):
            details["percent"] = round(100 * details["bytes"] / details["total"], 1)
        self._last_id = max(self._last_id + 1, time.time_ns() // 1_000_000)
        event = ModelEvent(self._last_id, history.id, history.model, history.version, stage, now, details)
        history.events.append(event)
        event_added, self._event_added = self._event_added, asyncio.Event()
        event_added.set()

    def progress_callback(self, history: EventHistory) -> Callable[..., None]:
        """Return ``on_progress(stage, **details)``, which any thread may call."""
        loop = asyncio.get_running_loop()

        def on_progress(stage: Stage, **details: Any) -> None:
            loop.call_soon_threadsafe(partial(self.append, history, stage, **details))

        return on_progress

    @contextlib.contextmanager
    def record_failure(self, history: EventHistory) -> Iterator[None]:
        """Finish the history with the error that is raised in this block."""
        try:
            yield
        except BaseException as error:
            details = {"reason": "internal", "message": type(error).__name__}
            if isinstance(error, RelayError):
                details = {"reason": error.reason, "message": str(error)[:_MAX_ERROR_LENGTH]}
                if detail := getattr(error, "detail", ""):
                    details["detail"] = detail[-_MAX_ERROR_LENGTH:]
            self.append(history, "failed", **details)
            raise

    def record_skipped(self, versions: Iterable[ModelRef]) -> None:
        """Add a failed history for each version whose entry in the registry cannot be read."""
        message = "Its entry in the registry is damaged, as the server's log describes; register it again."
        for ref in versions:
            self.append(self.open(ref.name, version=ref.version), "failed", reason="damaged", message=message)

    def find_unfinished(self, model: str, version: str) -> EventHistory | None:
        """Return the unfinished history of a version."""
        for history in reversed(self._histories.values()):
            if (history.model, history.version) == (model, version):
                return None if history.finished else history
        return None

    def discard(self, history: EventHistory) -> None:
        """Drop a history of an archive that became no version."""
        self._histories.pop(history.id, None)

    def list_events(self, query: EventQuery, allowed_models: tuple[str, ...]) -> list[ModelEvent]:
        """Return the events that match ``query`` and belong to ``allowed_models``, the newest first."""
        found = [
            event
            for history in self._histories.values()
            if matches(history.model, allowed_models) and query.model in ("", *history.names)
            for event in history.events
            if query.stage in ("", event.stage)
        ]
        return heapq.nlargest(query.limit, found, key=lambda event: event.id)

    def has_events(self, name: str, registration: str | None = None) -> bool:
        return any(True for _ in self._matching(name, registration))

    async def wait_for_events(
        self, name: str, registration: str | None, since: int | None, timeout: float
    ) -> list[ModelEvent]:
        """Return a name's events after the one with id ``since``, as soon as there is one.

        The list is empty after ``timeout`` seconds. Without ``since`` it holds the events of the last
        history; with ``registration`` those of that history alone, which may not be open yet.
        """
        deadline = time.monotonic() + timeout
        while True:
            event_added = self._event_added
            histories = list(self._matching(name, registration))
            if since is None:
                found = list(histories[-1].events) if histories else []
            else:
                found = sorted(
                    (event for history in histories for event in history.events if event.id > since),
                    key=lambda event: event.id,
                )
            remaining = deadline - time.monotonic()
            if found or remaining <= 0:
                return found
            try:
                await asyncio.wait_for(event_added.wait(), remaining)
            except asyncio.TimeoutError:
                return []

    def _matching(self, name: str, registration: str | None) -> Iterator[EventHistory]:
        for history in self._histories.values():
            if name in history.names and registration in (None, history.id):
                yield history

    def _drop_old(self) -> None:
        oldest = time.time() - _RETENTION_S
        for history in [h for h in self._histories.values() if h.finished and h.events[-1].time < oldest]:
            del self._histories[history.id]
        while len(self._histories) >= MAX_HISTORIES:
            self._histories.popitem(last=False)
