"""A streamed answer's bytes as pieces: as they came, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class Chunks:
    """The bytes as they came; over HTTP/1.1 each is what the server sent at once, or more of it."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        if data:
            yield data


@dataclass(frozen=True)
class Event:
    """A server-sent event; ``data`` is its lines, joined."""

    kind: str
    data: str
    id: str = ""

    def json(self) -> Any:
        return json.loads(self.data)


class Events:
    """Server-sent events, without comments. Source: HTML Living Standard, section 9.2.6."""

    def __init__(self) -> None:
        self._rest = b""
        self._kind = self._id = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.decode("utf-8", "replace").removesuffix("\r").partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "id":
                self._id = value
            elif name == "data":
                self._data.append(value)
            elif not name and not value:
                if self._data:
                    yield Event(self._kind or "message", "\n".join(self._data), self._id)
                self._kind, self._data = "", []
