"""Predictions and explanations with bodies of any type, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import httpx

from serve_app.client._body import Body, encode_body
from serve_app.client._decoders import ChunkDecoder, EventDecoder, ServerSentEvent
from serve_app.client._operations import (
    Operation,
    RequestDescriptor,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_json,
    join_path,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Priority = Literal["high", "normal", "low"]
# TorchServe's default names of these headers (runtime.header_key_sequence_...).
SEQUENCE_ID, SEQUENCE_END = "ts_request_sequence_id", "ts_request_sequence_end"


class PredictionOptions(TypedDict, total=False):
    """The options of a prediction, documented at ``PredictionOperations``."""

    timeout: float | None
    priority: Priority
    headers: Mapping[str, str] | None
    sequence: str
    sequence_end: bool


@dataclass(frozen=True)
class Prediction:
    """A model's response with its metadata.

    ``version`` is the version that ran, ``arm`` the experiment or rollout that counted the request with its
    arm, ``request_id`` the id that reward events name.
    """

    body: bytes
    status: int
    headers: httpx.Headers

    @property
    def content_type(self) -> str:
        return self._header("content-type")

    @property
    def version(self) -> str:
        return self._header("x-model-version")

    @property
    def arm(self) -> str:
        return self._header("x-torchrelay-arm")

    @property
    def request_id(self) -> str:
        return self._header("x-request-id")

    @property
    def sequence(self) -> str:
        """The id of the request's sequence, for its next request; empty where it has none."""
        return self._header(SEQUENCE_ID)

    def json(self) -> Any:
        return json.loads(self.body)

    def _header(self, name: str) -> str:
        value: str = self.headers.get(name, "")
        return value


class PredictionOperations:
    """Requests to models, and to workflows, which are called by their names as models are.

    ``body`` is bytes, text, or a mapping of names to parts, which is sent as ``multipart/form-data``; a
    handler receives each part by its name. A part that is text is a field; bytes, or ``(file name, bytes,
    content type)``, are a file. ``timeout`` are the seconds for a request with its waits and retries; the
    server receives it and drops requests whose deadline has passed. Without it the client's own timeout
    holds. ``headers`` are passed to the handler. ``sequence`` is the id of a stateful model's sequence; a
    request without one starts a sequence, and ``sequence_end`` ends it.
    """

    @Operation
    def request(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        *,
        explain: bool = False,
        **options: Unpack[PredictionOptions],
    ) -> RequestFlow[Prediction]:
        """Return a model's response, or with ``explain`` its explanation, with its metadata."""
        response = yield prediction_request(model, body, content_type, version, explain=explain, **options)
        return Prediction(response.content, response.status_code, response.headers)

    @Operation
    def predict(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        **options: Unpack[PredictionOptions],
    ) -> RequestFlow[bytes]:
        """Return the body of a model's response."""
        return (yield prediction_request(model, body, content_type, version, **options)).content

    @Operation
    def predict_json(
        self, model: str, value: Any, version: str | None = None, **options: Unpack[PredictionOptions]
    ) -> RequestFlow[Any]:
        """Send a JSON value and return the JSON value of the response."""
        body = json.dumps(value)
        request = prediction_request(model, body, "application/json", version, **options)
        return (yield from fetch_json(request))

    @Operation
    def explain(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        **options: Unpack[PredictionOptions],
    ) -> RequestFlow[bytes]:
        """Return the body of a model's explanation."""
        return (yield prediction_request(model, body, content_type, version, explain=True, **options)).content

    @Operation
    def explain_json(
        self, model: str, value: Any, version: str | None = None, **options: Unpack[PredictionOptions]
    ) -> RequestFlow[Any]:
        """Send a JSON value and return the explanation of its prediction, a JSON value."""
        body = json.dumps(value)
        request = prediction_request(model, body, "application/json", version, explain=True, **options)
        return (yield from fetch_json(request))

    @StreamOperation
    def stream(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        **options: Unpack[PredictionOptions],
    ) -> StreamDescriptor[bytes]:
        """Yield the chunks of a model's response as they arrive.

        An interrupted stream raises httpx.RemoteProtocolError, so a part is never taken for the whole.
        ``timeout`` limits the whole stream; without it there is no limit.
        """
        request = prediction_request(model, body, content_type, version, use_client_timeout=False, **options)
        return StreamDescriptor(request, ChunkDecoder())

    @StreamOperation
    def stream_events(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        **options: Unpack[PredictionOptions],
    ) -> StreamDescriptor[ServerSentEvent]:
        """Yield a model's response as server-sent events: one for each chunk, or the handler's own events.

        After the chunks there is an event ``end``, or ``error`` with the JSON of an error. ``timeout`` limits
        the whole stream.
        """
        request = prediction_request(model, body, content_type, version, use_client_timeout=False, **options)
        headers = {**request.headers, "accept": "text/event-stream"}
        return StreamDescriptor(replace(request, headers=headers), EventDecoder())


def prediction_request(
    model: str,
    body: Body,
    content_type: str,
    version: str | None,
    *,
    explain: bool = False,
    timeout: float | None = None,
    priority: Priority = "normal",
    headers: Mapping[str, str] | None = None,
    sequence: str = "",
    sequence_end: bool = False,
    use_client_timeout: bool = True,
) -> RequestDescriptor:
    """Return the request of a prediction or an explanation."""
    all_headers = httpx.Headers(headers)
    content, body_type = encode_body(body, content_type)
    if body_type:
        all_headers["content-type"] = body_type
    if sequence:
        all_headers[SEQUENCE_ID] = sequence
    if sequence_end:
        all_headers[SEQUENCE_END] = "true"
    if priority != "normal":
        all_headers["x-request-priority"] = priority
    return RequestDescriptor(
        "inference",
        "POST",
        join_path("explanations" if explain else "predictions", model, version),
        headers=all_headers,
        content=content,
        timeout=timeout,
        use_client_timeout=use_client_timeout,
    )
