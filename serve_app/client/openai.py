"""OpenAI's API, thinly: JSON in and out as OpenAI has it. Its own client can be pointed at ``/v1`` as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serve_app.client.ask import Ask, Listen, Talk, of_json, operation, path, streaming
from serve_app.client.errors import ServerError
from serve_app.client.pieces import Events

_Messages = Sequence[dict[str, Any]]


class OpenAI:
    """The routes under ``/v1``. ``model`` is a model's name or ``name:version``; ``more`` are fields of the body."""

    @operation
    def served_models(self) -> Talk[list[str]]:
        """The names by which models can be asked."""
        return [one["id"] for one in (yield Ask("inference", "GET", path("v1", "models"))).json()["data"]]

    @operation
    def chat(self, model: str, messages: _Messages, **more: Any) -> Talk[dict[str, Any]]:
        """A chat completion."""
        return (yield _post("chat/completions", model=model, messages=list(messages), **more)).json()

    @streaming
    def chat_stream(self, model: str, messages: _Messages, **more: Any) -> Listen[dict[str, Any]]:
        """The chunks of a chat completion, as they come."""
        body = {"model": model, "messages": list(messages), **more, "stream": True}
        return Listen(_post("chat/completions", False, **body), _Documents())

    @operation
    def complete(self, model: str, prompt: Any, **more: Any) -> Talk[dict[str, Any]]:
        """A completion."""
        return (yield _post("completions", model=model, prompt=prompt, **more)).json()

    @streaming
    def complete_stream(self, model: str, prompt: Any, **more: Any) -> Listen[dict[str, Any]]:
        """The chunks of a completion, as they come."""
        return Listen(_post("completions", False, model=model, prompt=prompt, **{**more, "stream": True}), _Documents())

    @operation
    def embed(self, model: str, texts: str | Sequence[str], **more: Any) -> Talk[list[list[float]]]:
        """The vector of each text."""
        given = texts if isinstance(texts, str) else list(texts)
        answer = yield _post("embeddings", model=model, input=given, **more)
        return [one["embedding"] for one in answer.json()["data"]]


def _post(verb: str, hurries: bool = True, **body: Any) -> Ask:
    return Ask("inference", "POST", f"/v1/{verb}", **of_json(body), hurries=hurries)


class _Documents:
    """The JSON of each event, up to the one that says that it was the last. Raises ServerError for an error's."""

    def __init__(self) -> None:
        self._events = Events()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        for event in self._events.feed(data):
            if event.data == "[DONE]":
                continue
            said = event.json()
            if "error" in said:
                error = said["error"]
                raise ServerError(200, error["message"], reason=str(error.get("code") or ""))
            yield said
