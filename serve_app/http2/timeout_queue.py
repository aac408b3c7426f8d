"""Timeouts of many entries with one timer, and the entries without progress, longest first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_Entry = TypeVar("_Entry", bound=Hashable)


class TimeoutQueue(Generic[_Entry]):
    """Entries in the order of their last progress.

    ``expire`` receives those without progress for ``timeout`` seconds; 0: never. All operations take constant
    time.
    """

    def __init__(self, timeout: float, expire: Callable[[_Entry], None]) -> None:
        self._timeout = timeout
        self._expire = expire
        self._entries: dict[_Entry, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, entry: _Entry) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[_Entry]:
        return iter(list(self._entries))

    def touch(self, entry: _Entry) -> None:
        """Add an entry, or record progress of it."""
        self._entries.pop(entry, None)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._entries[entry] = now = self._loop.time()
        if self._timer is None and self._timeout:
            self._timer = self._loop.call_at(now + self._timeout, self._check)

    def discard(self, entry: _Entry) -> None:
        self._entries.pop(entry, None)

    def oldest(self, minimum: float = 0.0) -> _Entry | None:
        """Return the entry longest without progress, if that is ``minimum`` seconds."""
        for entry, since in self._entries.items():
            assert self._loop is not None
            return entry if self._loop.time() - since >= minimum else None
        return None

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        assert self._loop is not None
        self._timer = None
        now = self._loop.time()
        for entry, since in list(self._entries.items()):
            if since + self._timeout > now:
                break
            if self._entries.pop(entry, None) is not None:  # not ended together with another one
                self._expire(entry)
        for since in self._entries.values():
            self._timer = self._loop.call_at(since + self._timeout, self._check)
            break
