"""The parameters of TorchServe's management requests: from a query, a form or a JSON body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from typing_extensions import TypedDict

from serve_app.domain import autoscaling, exact_json
from serve_app.domain.model import Registration
from serve_app.domain.validation import documented
from serve_app.protocols.http import form_data, json_body, large_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import JsonSyntaxError

_MAX_ID_LENGTH = 100  # characters of a registration's id
_INT32_MAX = 2**31 - 1
Flag = Annotated[str, documented("true; every other value is false.")]


def _integer(description: str) -> Any:
    return documented(description, minimum=0, maximum=_INT32_MAX)


class PageParameters(TypedDict, total=False):
    limit: Annotated[str, documented("The maximum number on a page, 0 to 100; other values stand for 100.")]
    next_page_token: Annotated[str, documented("The nextPageToken of the previous page.")]


class RegistrationParameters(TypedDict, total=False):
    url: Annotated[str, documented("A file of the model store, or the URL of the archive.")]
    model_name: Annotated[str, documented("The model's name; default: that of the manifest.")]
    handler: Annotated[str, documented("The handler; default: that of the manifest.")]
    task: Annotated[str, documented("The task of a Hugging Face folder; default: derived from its files.")]
    runtime: Annotated[str, documented("The interpreter of the handler; default: that of the manifest.")]
    registration: Annotated[str, documented("A name by which its events are selected.")]
    batch_size: Annotated[int, _integer("The maximum number of requests in a batch.")]
    max_batch_delay: Annotated[int, _integer("The time in milliseconds that an incomplete batch waits.")]
    initial_workers: Annotated[int, _integer("The number of workers to start.")]
    response_timeout: Annotated[int, _integer("The timeout of a batch in seconds.")]
    startup_timeout: Annotated[int, _integer("The timeout of a worker's start in seconds.")]
    synchronous: Annotated[Flag, documented("true: respond after the workers have started.")]
    s3_sse_kms: Annotated[Flag, documented("true: an https URL of S3's is signed.")]
    sha256: Annotated[str, documented("The expected SHA-256 of the archive, in hex.")]
    trusted: Annotated[Flag, documented("true: weights and a folder's own code may run as they load.")]


_Seconds = Annotated[float, documented("Seconds of sustained load before workers change.", minimum=0)]


class ScalingParameters(TypedDict, total=False):
    min_worker: Annotated[int, _integer("The minimum number of workers; default 1.")]
    max_worker: Annotated[int, _integer("The maximum; default min_worker.")]
    synchronous: Annotated[Flag, documented("true: respond after the workers have started.")]
    autoscaling_policy: Annotated[
        Literal["requests", "latency", "prometheus", "external"],
        documented("The signal that workers follow."),
    ]
    target_ongoing_requests: Annotated[float, documented("The target number of rows per worker.", minimum=0)]
    target_p95_ms: Annotated[float, documented("Policy latency: the target p95 in milliseconds.", minimum=0)]
    autoscaling_query: Annotated[str, documented("Policy prometheus: PromQL with one value as its result.")]
    target_value: Annotated[float, documented("Policy prometheus: the value per worker.", minimum=0)]
    upscale_delay_s: _Seconds
    downscale_delay_s: _Seconds
    downscale_to_zero_delay_s: Annotated[_Seconds, documented("The same for the last worker.")]
    look_back_period_s: Annotated[float, documented("Seconds over which load is measured.", minimum=0)]


class DescribeParameters(TypedDict, total=False):
    customized: Annotated[Flag, documented("true: include the handler's own metadata.")]


class TokenParameters(TypedDict, total=False):
    type: Annotated[Literal["management", "inference"], documented("The key to replace.")]


class WorkflowParameters(TypedDict, total=False):
    url: Annotated[str, documented("A name in the workflow store, or a URL.")]
    workflow_name: Annotated[str, documented("The name; default: the archive's.")]
    response_timeout: Annotated[int, documented("The timeout of its models in seconds.")]
    startup_timeout: Annotated[int, documented("The timeout of their start in seconds.")]
    s3_sse_kms: Annotated[Flag, documented("true: an https URL of S3's is signed.")]
    sha256: Annotated[str, documented("The expected SHA-256 of the archive, in hex.")]


_TEXT_PARAMETERS = ("model_name", "handler", "task", "runtime", "sha256")
COUNT_PARAMETERS = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")
_INTEGER_PARAMETERS = {*COUNT_PARAMETERS, "min_worker", "max_worker"}
# Parameters of a change of workers, and their autoscaling keys; the others have the key's own name.
AUTOSCALING_PARAMETERS = {key: key for key in autoscaling.KEYS if key not in ("policy", "query")} | {
    "autoscaling_policy": "policy",
    "autoscaling_query": "query",
}
_PARAMETERS = {
    "model_version",
    *RegistrationParameters.__annotations__,
    *ScalingParameters.__annotations__,
}
_INTEGER = re.compile(r"(?P<sign>[+-]?)0*(?P<digits>[0-9]+)")
_MAX_DIGITS = 100  # that are parsed of a number; Python refuses 4,301, and every limit is far below both


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
        parameters.update(await large_body.parse_body(body, _parse_json_parameters, body))
    elif mime in (form_data.MULTIPART, form_data.URLENCODED):
        fields = await form_data.read_body(content_type, body)
        parameters.update({field.name: field.value.decode("utf-8", "replace") for field in fields})
    return parameters


def parse_registration(parameters: Mapping[str, str]) -> Registration:
    """Return the registration that the parameters describe.

    A number that cannot be parsed is ignored, as TorchServe does.
    """
    counts: dict[str, Any] = {key: parse_count(parameters.get(key), None) for key in COUNT_PARAMETERS}
    texts: dict[str, Any] = {key: parameters.get(key) or None for key in _TEXT_PARAMETERS}
    return Registration(
        url=parameters.get("url", ""),
        **texts,
        **counts,
        wait=parse_bool(parameters.get("synchronous", "true")),
        s3_sse_kms=parse_bool(parameters.get("s3_sse_kms")),
        trusted=parse_bool(parameters.get("trusted")),
        id=parameters.get("registration", "")[:_MAX_ID_LENGTH] or None,
    )


def parse_count(text: str | None, default: Any) -> Any:
    """Return the number in ``text``, of any size, so that a limit can refuse it; or ``default``."""
    match = _INTEGER.fullmatch(text or "")
    return int(match["sign"] + match["digits"][:_MAX_DIGITS]) if match is not None else default


def parse_integer(text: str | None, default: Any) -> Any:
    """Return the number in ``text``, parsed as Java parses a 32-bit integer, or ``default``."""
    number = parse_count(text, None)
    if number is None:
        return default
    return number if -(2**31) <= number < 2**31 else default


def parse_bool(text: str | None) -> bool:
    return text is not None and text.lower() == "true"


def _parse_json_parameters(body: bytes) -> dict[str, str]:
    """Return a JSON body's parameters as the text that a query would have. Raises JsonSyntaxError."""
    return {
        key: _to_text(key, value)
        for key, value in json_body.parse_object(body, JsonSyntaxError).items()
        if key in _PARAMETERS and value is not None
    }


def _to_text(key: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (dict, list)) or (key in _INTEGER_PARAMETERS and parse_count(text, None) is None):
        expected = "an integer" if key in _INTEGER_PARAMETERS else "text"
        raise JsonSyntaxError(f"{key} must be {expected}, and is {exact_json.dumps(value).decode()}.")
    return text
