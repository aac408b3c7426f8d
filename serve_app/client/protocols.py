"""Requests of other protocols that show a model's interface: Open Inference, and OpenAI's chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from serve_app.client._decoders import EventDecoder
from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestDescriptor,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_object,
    join_path,
)

_JSON = {"content-type": "application/json"}


class ProtocolOperations:
    """The smallest part of these protocols; their own clients have the rest."""

    @Operation
    def model_metadata(self, model: str, version: str | None = None) -> RequestFlow[JsonObject]:
        """Return ``inputs`` and ``outputs`` of a model by the Open Inference Protocol; empty if unknown."""
        where = ("v2", "models", model, *(("versions", version) if version else ()))
        return (yield from fetch_object(RequestDescriptor("inference", "GET", join_path(*where))))

    @Operation
    def infer(self, model: str, document: JsonObject, version: str | None = None) -> RequestFlow[JsonObject]:
        """Send tensors by the Open Inference Protocol, and return its JSON document."""
        where = join_path("v2", "models", model, *(("versions", version) if version else ()), "infer")
        content = json.dumps(document).encode()
        return (yield from fetch_object(RequestDescriptor("inference", "POST", where, {}, _JSON, content)))

    @StreamOperation
    def stream_chat(
        self, /, model: str, messages: Sequence[JsonObject], **parameters: Any
    ) -> StreamDescriptor[str]:
        """Yield the text of a chat completion as it is generated.

        ``messages`` have ``role`` and ``content``; ``parameters`` are OpenAI's, such as ``max_tokens``.
        """
        document = {"model": model, "messages": list(messages), "stream": True, **parameters}
        content = json.dumps(document).encode()
        request = RequestDescriptor(
            "inference", "POST", "/v1/chat/completions", {}, _JSON, content, idle_timeout=None
        )
        return StreamDescriptor(request, _ChatDecoder())


class _ChatDecoder:
    """A decoder of the events of a chat completion into pieces of text."""

    def __init__(self) -> None:
        self._events = EventDecoder()

    def feed(self, data: bytes) -> Iterator[str]:
        for event in self._events.feed(data):
            if event.data == "[DONE]":
                continue
            document = event.json()
            if "error" in document:
                raise RuntimeError(str(document["error"].get("message", document["error"])))
            for choice in document.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield text
