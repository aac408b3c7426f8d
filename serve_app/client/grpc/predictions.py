"""Predictions by TorchServe's service: any body in, any body out, whole, in pieces, or one after the other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any
from uuid import uuid4

import grpc
import httpx
from google.rpc.error_details_pb2 import ErrorInfo

from serve_app.client.ask import operation, streaming
from serve_app.client.errors import ServerError
from serve_app.client.forms import Body
from serve_app.client.grpc import errors
from serve_app.client.grpc.ask import Answered, Ask, Listen, Requests, Talk
from serve_app.client.predictions import ENDS, SEQUENCE, Prediction, Urgency
from serve_app.proto.inference_pb2 import PredictionResponse, PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub as Stub

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class Piece:
    """One answer of a sequence, or a piece of one; where it is an ``error``, that is what its request came to."""

    body: bytes
    sequence: str
    error: ServerError | None = None


class Predictions:
    """Calls of models, and of workflows, which are called by their names as models are.

    ``body`` is bytes, text, or a mapping of names to parts, which are text or bytes; a handler gets each by its name.
    ``content_type`` is of a body that is no mapping. ``timeout`` are the seconds for all of a call, its waits and
    further attempts included; it is the call's deadline, and without it a call has the client's own. ``headers`` are
    metadata, and go to the handler. ``sequence`` names the sequence of a stateful model's call, which begins one where
    it names none; ``ends`` says that it is the last of it.
    """

    @operation
    def ask(
        self,
        model: str,
        body: Body,
        content_type: str = "",
        version: str | None = None,
        *,
        timeout: float | None = None,
        priority: Urgency = "normal",
        headers: Mapping[str, str] | None = None,
        sequence: str = "",
        ends: bool = False,
    ) -> Talk[Prediction]:
        """A model's answer with everything that was said of it."""
        how = {"timeout": timeout, "priority": priority, "headers": headers, "sequence": sequence, "ends": ends}
        return _prediction((yield asked("Predictions", model, body, content_type, version, **how)))

    @operation
    def predict(
        self, model: str, body: Body, content_type: str = "", version: str | None = None, **more: Any
    ) -> Talk[bytes]:
        """The body of a model's answer; ``more`` is that of ``ask``."""
        return (yield asked("Predictions", model, body, content_type, version, **more)).message.prediction

    @operation
    def predict_json(self, model: str, value: Any, version: str | None = None, **more: Any) -> Talk[Any]:
        """A model's answer to a JSON value, as a JSON value; ``more`` is that of ``ask``."""
        answer = yield asked("Predictions", model, json.dumps(value), "application/json", version, **more)
        return json.loads(answer.message.prediction)

    @streaming
    def stream(
        self, model: str, body: Body, content_type: str = "", version: str | None = None, **more: Any
    ) -> Listen[bytes]:
        """The pieces of a model's answer as they come; ``more`` is that of ``ask``.

        ``timeout`` is that of the whole stream, and it has none unless it is given one. Who leaves a stream cancels it.
        """
        ask = asked("StreamPredictions", model, body, content_type, version, None, **more)
        return Listen(ask, lambda message: message.prediction)

    @streaming
    def stream_sequence(
        self,
        model: str,
        bodies: Iterable[Body] | AsyncIterable[Body],
        content_type: str = "",
        version: str | None = None,
        *,
        timeout: float | None = None,
        priority: Urgency = "normal",
        headers: Mapping[str, str] | None = None,
        sequence: str = "",
    ) -> Listen[Piece]:
        """The answers to the calls of one sequence over one stream, each of which is sent as ``bodies`` gives it.

        A mapping whose part ``ts_request_sequence_end`` is ``true`` is the last of its sequence. An answer that goes
        wrong is a piece with its ``error``, and the stream goes on. ``sequence`` is its name, made up where there is
        none. ``timeout`` is that of the whole stream.
        """
        name = sequence or uuid4().hex
        metadata = _metadata(priority, headers, content_type)

        def request(body: Body) -> PredictionsRequest:
            return _request(model, version, _parts(body, content_type), name)

        ask = Ask("inference", Stub, "StreamPredictions2", Requests(bodies, request), metadata, timeout)
        return Listen(ask, lambda message: _piece(message, name))


def asked(
    method: str,
    model: str,
    body: Body,
    content_type: str,
    version: str | None,
    usual: EllipsisType | None = ...,
    *,
    timeout: float | None = None,
    priority: Urgency = "normal",
    headers: Mapping[str, str] | None = None,
    sequence: str = "",
    ends: bool = False,
) -> Ask:
    """The call of a prediction; ``usual`` is the time of one that is given none."""
    request = _request(model, version, _parts(body, content_type), sequence)
    metadata = _metadata(priority, headers, content_type) | ({ENDS: "true"} if ends else {})
    return Ask("inference", Stub, method, request, metadata, usual if timeout is None else timeout)


def _parts(body: Body, content_type: str) -> dict[str, bytes]:
    """A body as a row's parts. Raises ValueError for parts that gRPC has no form for."""
    if isinstance(body, (str, bytes)):
        return {"body": _bytes(body)}
    if not body:
        raise ValueError("There is no part to send; a mapping that is meant as JSON goes by predict_json.")
    if content_type:
        raise ValueError(f"Named parts have no type over gRPC, and are not {content_type}; send JSON by predict_json.")
    for name, part in body.items():
        if not isinstance(part, (str, bytes)):
            raise ValueError(
                f"The part {name} has a file name and a type, for which gRPC has no place: give its bytes alone, "
                "or send it over HTTP, by serve_app.client.Client."
            )
    return {name: _bytes(part) for name, part in body.items() if isinstance(part, (str, bytes))}


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part


def _request(model: str, version: str | None, parts: dict[str, bytes], sequence: str) -> PredictionsRequest:
    return PredictionsRequest(model_name=model, model_version=version or "", input=parts, sequence_id=sequence or None)


def _metadata(priority: Urgency, headers: Mapping[str, str] | None, content_type: str) -> dict[str, str]:
    named = {name.lower(): value for name, value in (headers or {}).items()}
    kind = content_type or named.pop("content-type", "")  # which is gRPC's own there
    if kind:
        named["x-content-type"] = kind
    if priority != "normal":
        named["x-request-priority"] = priority
    return named


def _prediction(answer: Answered) -> Prediction:
    headers = httpx.Headers({name: value for name, value in answer.said.items() if isinstance(value, str)})
    if "x-content-type" in headers:
        headers["content-type"] = headers.pop("x-content-type")
    if answer.message.sequence_id:
        headers[SEQUENCE] = answer.message.sequence_id
    return Prediction(answer.message.prediction, int(headers.get("x-status", "200").split()[0]), headers)


def _piece(message: PredictionResponse, name: str) -> Piece:
    error = None
    if message.HasField("status"):
        info = ErrorInfo()
        beside = {}
        if message.status.details and message.status.details[0].Unpack(info):
            beside = {**info.metadata, "x-torchrelay-reason": info.reason}
        error = errors.told(_CODES.get(message.status.code), message.status.message, beside)
    return Piece(message.prediction, message.sequence_id or name, error)
