"""The protocol's text generation, for handlers that serve OpenAI's completions. The functions are pure.

Source: KServe's specification of ``generate`` and ``generate_stream``. The handler is called as TorchServe
calls one, with the header ``url_path``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app.domain import exact_json
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, Priority, ResponseStream
from serve_app.domain.signature import abbreviate
from serve_app.domain.validation import documented
from serve_app.errors import HandlerRejected, InvalidBody, RelayError
from serve_app.protocols.openinference.conversion import build_rejection

COMPLETIONS_PATH = "v1/completions"
_DEFAULT_MAX_TOKENS = 20  # as in the specification
_SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "seed", "stop")
_FINISH_REASONS = {"length": "length", "stop": "eos_token"}
_EVENT_PREFIX = b"data: "
_DONE = b"[DONE]"


class GenerateBody(TypedDict):
    text_input: Annotated[str, documented("The prompt.")]
    id: NotRequired[str]
    parameters: NotRequired[
        Annotated[dict[str, Any], documented("max_tokens, temperature, seed, stop, details …")]
    ]


class GeneratedText(TypedDict):
    text_output: str
    model_name: str
    model_version: str
    id: NotRequired[str]
    details: NotRequired[Annotated[dict[str, str], documented("The finish_reason.")]]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A parsed request. ``details``: the response has the finish reason."""

    model: str
    version: str | None
    text: str
    parameters: Mapping[str, Any]
    id: str = ""
    stream: bool = False

    @property
    def details(self) -> bool:
        return self.parameters.get("details") is True


def parse_request(
    model: str, version: str | None, document: Mapping[str, Any], stream: bool
) -> GenerateRequest:
    """Parse the document of a body. Raises InvalidBody."""
    text, parameters, id = document.get("text_input"), document.get("parameters"), document.get("id")
    if not isinstance(text, str):
        raise InvalidBody(f"text_input is {abbreviate(text)}; it is the text to go on from.")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidBody(f"parameters is {abbreviate(parameters)}; it is an object.")
    if id is not None and not isinstance(id, str):
        raise InvalidBody(f"id is {abbreviate(id)}; it is a text.")
    # Triton's clients write them beside text_input.
    top_level = {key: document[key] for key in ("max_tokens", *_SAMPLING_PARAMETERS) if key in document}
    return GenerateRequest(model, version, text, {**top_level, **(parameters or {})}, id or "", stream)


def build_request(
    generate_request: GenerateRequest,
    request_id: str,
    headers: Mapping[str, str],
    deadline: float | None = None,
    priority: Priority = "normal",
) -> InferenceRequest:
    """Return the request of a completion."""
    parameters = generate_request.parameters
    body = {
        "model": generate_request.model,
        "prompt": generate_request.text,
        "max_tokens": parameters.get("max_tokens", _DEFAULT_MAX_TOKENS),
        "stream": generate_request.stream,
        **{key: parameters[key] for key in _SAMPLING_PARAMETERS if parameters.get(key) is not None},
    }
    inputs = (InputPart("body", exact_json.dumps(body), "application/json"),)
    request_headers = {**headers, "url_path": COMPLETIONS_PATH, "explain": "False"}
    return InferenceRequest(
        generate_request.model,
        generate_request.version,
        inputs,
        request_headers,
        "predict",
        request_id,
        deadline,
        priority,
    )


def to_document(generate_request: GenerateRequest, response: InferenceResponse) -> GeneratedText:
    """Return the document of a response. Raises HandlerRejected."""
    if not 200 <= response.status < 300:
        raise build_rejection(response, _error_message(response.body))
    choice = _first_choice(_parse_json(response.body))
    return _build_output(generate_request, response.version, choice.get("text"), choice.get("finish_reason"))


async def encode_events(generate_request: GenerateRequest, stream: ResponseStream) -> AsyncIterator[bytes]:
    """Yield a server-sent event for each chunk of text; an error in mid-stream is ``{"error": text}``."""
    rest = b""
    try:
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n\n")
            for line in lines:
                data = line.removeprefix(_EVENT_PREFIX)
                if not line.startswith(_EVENT_PREFIX) or data == _DONE:
                    continue
                document = _parse_json(data)
                if "error" in document:
                    yield _encode_event({"error": _error_message(data)})
                elif document.get("choices"):
                    choice = _first_choice(document)
                    text, finish_reason = choice.get("text"), choice.get("finish_reason")
                    version = stream.head.version
                    yield _encode_event(_build_output(generate_request, version, text, finish_reason))
    except RelayError as error:
        yield _encode_event({"error": str(error)})


def _build_output(
    generate_request: GenerateRequest, version: str, text: Any, finish_reason: Any
) -> GeneratedText:
    output: GeneratedText = {
        "text_output": text or "",
        "model_name": generate_request.model,
        "model_version": version,
    }
    if generate_request.id:
        output["id"] = generate_request.id
    if generate_request.details and finish_reason:
        at_stop_sequence = finish_reason == "stop" and generate_request.parameters.get("stop")
        reason = "stop_sequence" if at_stop_sequence else _FINISH_REASONS.get(finish_reason, finish_reason)
        output["details"] = {"finish_reason": reason}
    return output


def _encode_event(document: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % exact_json.dumps(document)


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        document = exact_json.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise _not_generative()
    return document


def _first_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    choices = document.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    raise _not_generative()


def _not_generative() -> HandlerRejected:
    return HandlerRejected(
        f"This model generates no text: its handler does not answer {COMPLETIONS_PATH}.", 501
    )


def _error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or else the body."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace")
