"""OpenAI's API: requests and responses are OpenAI's JSON documents.

OpenAI's own client can be pointed at ``/v1`` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serve_app.client._decoders import EventDecoder
from serve_app.client._operations import (
    Operation,
    RequestDescriptor,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_list,
    fetch_object,
    join_path,
    json_body,
)
from serve_app.client.errors import ServerError

_Messages = Sequence[dict[str, Any]]


class OpenAIOperations:
    """The routes under ``/v1``.

    ``model`` is a model's name or ``name:version``; ``fields`` are further fields of the body.
    """

    @Operation
    def served_models(self) -> RequestFlow[list[str]]:
        """Return the names by which models can be requested."""
        request = RequestDescriptor("inference", "GET", join_path("v1", "models"))
        return [model["id"] for model in (yield from fetch_list(request, "data"))]

    @Operation
    def chat(self, /, model: str, messages: _Messages, **fields: Any) -> RequestFlow[dict[str, Any]]:
        """Return a chat completion."""
        body = {"model": model, "messages": list(messages), **fields}
        return (yield from fetch_object(_post("chat/completions", body)))

    @StreamOperation
    def chat_stream(
        self, /, model: str, messages: _Messages, **fields: Any
    ) -> StreamDescriptor[dict[str, Any]]:
        """Yield the chunks of a chat completion as they arrive."""
        body = {"model": model, "messages": list(messages), **fields, "stream": True}
        return StreamDescriptor(_post("chat/completions", body, use_client_timeout=False), _JsonDecoder())

    @Operation
    def complete(self, /, model: str, prompt: Any, **fields: Any) -> RequestFlow[dict[str, Any]]:
        """Return a completion."""
        return (yield from fetch_object(_post("completions", {"model": model, "prompt": prompt, **fields})))

    @StreamOperation
    def complete_stream(self, /, model: str, prompt: Any, **fields: Any) -> StreamDescriptor[dict[str, Any]]:
        """Yield the chunks of a completion as they arrive."""
        body = {"model": model, "prompt": prompt, **fields, "stream": True}
        return StreamDescriptor(_post("completions", body, use_client_timeout=False), _JsonDecoder())

    @Operation
    def embed(
        self, /, model: str, texts: str | Sequence[str], **fields: Any
    ) -> RequestFlow[list[list[float]]]:
        """Return the vector of each text."""
        body = {"model": model, "input": texts if isinstance(texts, str) else list(texts), **fields}
        return [item["embedding"] for item in (yield from fetch_list(_post("embeddings", body), "data"))]


def _post(route: str, body: dict[str, Any], use_client_timeout: bool = True) -> RequestDescriptor:
    return RequestDescriptor(
        "inference", "POST", f"/v1/{route}", **json_body(body), use_client_timeout=use_client_timeout
    )


class _JsonDecoder:
    """A decoder of events into their JSON; the final event ``[DONE]`` is skipped.

    Raises ServerError for an event that is an error.
    """

    def __init__(self) -> None:
        self._events = EventDecoder()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        for event in self._events.feed(data):
            if event.data == "[DONE]":
                continue
            document = event.json()
            if "error" in document:
                error = document["error"]
                raise ServerError(200, error["message"], reason=str(error.get("code") or ""))
            yield document
