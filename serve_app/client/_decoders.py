"""Decoders of streamed responses: bytes as received, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class ChunkDecoder:
    """A decoder that passes bytes on as received.

    Over HTTP/1.1 a chunk holds at least one write of the server, or several.
    """

    def feed(self, data: bytes) -> Iterator[bytes]:
        if data:
            yield data


@dataclass(frozen=True)
class ServerSentEvent:
    """A server-sent event; ``data`` holds its lines, joined."""

    kind: str
    data: str
    id: str = ""

    def json(self) -> Any:
        return json.loads(self.data)


class EventDecoder:
    """A decoder of server-sent events that skips comments.

    Source: HTML Living Standard, section 9.2.6.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._kind = self._id = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
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
                    yield ServerSentEvent(self._kind or "message", "\n".join(self._data), self._id)
                self._kind, self._data = "", []
