"""Anthropic's form of errors; their statuses are those of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.protocols.http.error_text import HandlerErrors
from serve_app.protocols.http.exchange import JSON, HttpExchange, build_error_headers
from serve_app.protocols.openai import errors as openai_errors

# By status; other statuses below 500 are invalid requests, those above faults of the API.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorFields(TypedDict):
    type: str
    message: str
    detail: NotRequired[Annotated[str, documented("Of a handler's failure, if enabled.")]]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: NotRequired[str]


def build_document(message: str, status: int) -> AnthropicError:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


async def send_error(exchange: HttpExchange, error: Exception, shown: HandlerErrors = "hidden") -> None:
    status = openai_errors.find_status(error)[0]
    fields = openai_errors.to_document(error, exchange.request_id, shown)["error"]
    document = build_document(fields["message"], status)
    if "detail" in fields:
        document["error"]["detail"] = fields["detail"]
    document["request_id"] = exchange.request_id
    await exchange.send_response(status, [JSON, *build_error_headers(error)], exact_json.dumps(document))
