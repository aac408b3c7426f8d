"""Generated text in the protocol's words, for handlers that answer OpenAI's completions. Pure functions, on no wire.

Source: KServe's specification of ``generate`` and ``generate_stream``. The handler is asked as TorchServe asks one, by
the header ``url_path``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.doors.oip.convert import declined
from serve_app.errors import HandlerSaid, InvalidBody, RelayError
from serve_app.signature import short
from serve_app.types import Call, Input, Priority, Reply, ReplyStream

PATH = "v1/completions"
_TOKENS = 20  # where nobody says how many, as the specification has it
_PASSED = ("temperature", "top_p", "top_k", "seed", "stop")
_REASONS = {"length": "length", "stop": "eos_token"}
_EVENT = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, read. ``details``: finish reasons are wanted."""

    model: str
    version: str | None
    text: str
    parameters: Mapping[str, Any]
    id: str = ""
    stream: bool = False

    @property
    def details(self) -> bool:
        return self.parameters.get("details") is True


def read(model: str, version: str | None, said: Mapping[str, Any], stream: bool) -> Prompt:
    """A body's document. Raises InvalidBody."""
    text, parameters, id = said.get("text_input"), said.get("parameters"), said.get("id")
    if not isinstance(text, str):
        raise InvalidBody(f"text_input is {short(text)}; it is the text to go on from.")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidBody(f"parameters is {short(parameters)}; it is an object.")
    if id is not None and not isinstance(id, str):
        raise InvalidBody(f"id is {short(id)}; it is a text.")
    beside = {key: said[key] for key in ("max_tokens", *_PASSED) if key in said}  # where Triton's clients write them
    return Prompt(model, version, text, {**beside, **(parameters or {})}, id or "", stream)


def call(
    asked: Prompt,
    request_id: str,
    headers: Mapping[str, str],
    deadline: float | None = None,
    priority: Priority = "normal",
) -> Call:
    """The call of a completion."""
    said = asked.parameters
    body = {
        "model": asked.model,
        "prompt": asked.text,
        "max_tokens": said.get("max_tokens", _TOKENS),
        "stream": asked.stream,
        **{key: said[key] for key in _PASSED if said.get(key) is not None},
    }
    inputs = (Input("body", orjson.dumps(body), "application/json"),)
    sent = {**headers, "url_path": PATH, "explain": "False"}
    return Call(asked.model, asked.version, inputs, sent, "predict", request_id, deadline, priority)


def whole(asked: Prompt, reply: Reply) -> dict[str, Any]:
    """The answer's document. Raises HandlerSaid."""
    if not 200 <= reply.status < 300:
        raise declined(reply, _words(reply.body))
    choice = _choice(_json(reply.body))
    return _said(asked, reply.version, choice.get("text"), choice.get("finish_reason"))


async def events(asked: Prompt, stream: ReplyStream) -> AsyncIterator[bytes]:
    """Server-sent events, one for each piece of text; what goes wrong in mid-stream is one ``{"error": text}``."""
    rest = b""
    try:
        async for piece in stream:
            *lines, rest = (rest + piece).split(b"\n\n")
            for line in lines:
                data = line.removeprefix(_EVENT)
                if not line.startswith(_EVENT) or data == _DONE:
                    continue
                said = _json(data)
                if "error" in said:
                    yield _event({"error": _words(data)})
                elif said.get("choices"):
                    choice = _choice(said)
                    yield _event(_said(asked, stream.head.version, choice.get("text"), choice.get("finish_reason")))
    except RelayError as error:
        yield _event({"error": str(error)})


def _said(asked: Prompt, version: str, text: Any, reason: Any) -> dict[str, Any]:
    said = {"text_output": text or "", "model_name": asked.model, "model_version": version}
    if asked.id:
        said["id"] = asked.id
    if asked.details and reason:
        ended = "stop_sequence" if reason == "stop" and asked.parameters.get("stop") else _REASONS.get(reason, reason)
        said["details"] = {"finish_reason": ended}
    return said


def _event(said: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(said)


def _json(body: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict):
        raise HandlerSaid(f"This model generates no text: its handler does not answer {PATH}.", 501)
    return said


def _choice(said: Mapping[str, Any]) -> dict[str, Any]:
    choices = said.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    raise HandlerSaid(f"This model generates no text: its handler does not answer {PATH}.", 501)


def _words(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the body as it is."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace")
