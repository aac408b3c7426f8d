"""The parameters of TorchServe's management requests: from a query, a form or a JSON body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from serve_app.domain import autoscaling
from serve_app.domain.model import Registration
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.torchserve import form_data
from serve_app.protocols.torchserve.errors import JsonSyntaxError

_MAX_ID_LENGTH = 100  # characters of a registration's id
_TEXT_PARAMETERS = ("model_name", "handler", "task", "runtime")
COUNT_PARAMETERS = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")
_INTEGER_PARAMETERS = {*COUNT_PARAMETERS, "min_worker", "max_worker"}
# Parameters of a change of workers, and their autoscaling keys; the others have the key's own name.
AUTOSCALING_PARAMETERS = {key: key for key in autoscaling.KEYS if key != "policy"} | {
    "autoscaling_policy": "policy"
}
_PARAMETERS = {
    "url",
    "synchronous",
    "model_version",
    "s3_sse_kms",
    "registration",
    *_TEXT_PARAMETERS,
    *_INTEGER_PARAMETERS,
    *AUTOSCALING_PARAMETERS,
}
_INTEGER = re.compile(r"[+-]?[0-9]+")


def parse_query(exchange: HttpExchange) -> dict[str, str]:
    """Return the query's parameters; a repeated one has its first value."""
    pairs = parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return dict(reversed(pairs))


async def read_parameters(exchange: HttpExchange, max_body_size: int) -> dict[str, str]:
    """Return the parameters of the query, the form or the JSON body; the body overrides the query."""
    parameters = parse_query(exchange)
    body = await exchange.read_body(max_body_size)
    content_type = exchange.headers.get("content-type", "")
    mime = content_type.partition(";")[0].strip().lower()
    if body and mime == "application/json":
        parameters.update(_parse_json_parameters(body))
    elif mime in (form_data.MULTIPART, form_data.URLENCODED):
        fields = form_data.parse_body(content_type, body)
        parameters.update({field.name: field.value.decode("utf-8", "replace") for field in fields})
    return parameters


def parse_registration(parameters: Mapping[str, str]) -> Registration:
    """Return the registration that the parameters describe.

    A number that cannot be parsed is ignored, as TorchServe does.
    """
    counts: dict[str, Any] = {key: parse_integer(parameters.get(key), None) for key in COUNT_PARAMETERS}
    texts: dict[str, Any] = {key: parameters.get(key) or None for key in _TEXT_PARAMETERS}
    return Registration(
        url=parameters.get("url", ""),
        **texts,
        **counts,
        wait=parse_bool(parameters.get("synchronous", "true")),
        s3_sse_kms=parse_bool(parameters.get("s3_sse_kms")),
        id=parameters.get("registration", "")[:_MAX_ID_LENGTH] or None,
    )


def parse_integer(text: str | None, default: Any) -> Any:
    """Return the number in ``text``, parsed as Java parses a 32-bit integer, or ``default``."""
    if text is None or not _INTEGER.fullmatch(text) or len(text) > 11:
        return default
    number = int(text)
    return number if -(2**31) <= number < 2**31 else default


def parse_bool(text: str | None) -> bool:
    return text is not None and text.lower() == "true"


def _parse_json_parameters(body: bytes) -> dict[str, str]:
    """Return a JSON body's parameters as the text that a query would have. Raises JsonSyntaxError."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise JsonSyntaxError(f"The body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise JsonSyntaxError(f"The body must be a JSON object, and is a {type(document).__name__}.")
    return {
        key: _to_text(key, value)
        for key, value in document.items()
        if key in _PARAMETERS and value is not None
    }


def _to_text(key: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (dict, list)) or (key in _INTEGER_PARAMETERS and parse_integer(text, None) is None):
        expected = "an integer" if key in _INTEGER_PARAMETERS else "text"
        raise JsonSyntaxError(f"{key} must be {expected}, and is {orjson.dumps(value).decode()}.")
    return text
