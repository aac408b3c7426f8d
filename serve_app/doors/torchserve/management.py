"""TorchServe's REST management API for models, over the control plane."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qsl

import orjson

from serve_app import autoscaling
from serve_app.controlplane import ControlPlane
from serve_app.doors import auth, experiments, rollout, shadow, traffic
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors, events, forms, openapi
from serve_app.doors.torchserve.errors import JsonSyntaxError, TokenRefused
from serve_app.errors import (
    AccessDenied,
    ArchiveNotFound,
    MethodNotAllowed,
    MissingParameter,
    NoWorker,
    ResourceNotFound,
    StartFailed,
)
from serve_app.settings import Settings
from serve_app.types import Description, Progress, Registration, Worker

MAX_BATCH_DELAY = 100  # milliseconds, what TorchServe shows where nobody said
PAGE = 100
_LONGEST_ID = 100  # characters of a registration's own name
_WORDS = ("model_name", "handler", "task", "runtime")
COUNTS = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")
_NUMBERS = {*COUNTS, "min_worker", "max_worker"}
# Parameters of a change of workers; what else autoscaling knows is called as it is there.
_OF_AUTOSCALING = {key: key for key in autoscaling.KEYS if key != "policy"} | {"autoscaling_policy": "policy"}
_KNOWN = {"url", "synchronous", "model_version", "s3_sse_kms", "registration", *_WORDS, *_NUMBERS, *_OF_AUTOSCALING}
_INTEGER = re.compile(r"[+-]?[0-9]+")


class NobodyDescribes(NoWorker):
    """``NobodyDescribes(model)``"""

    def __str__(self) -> str:
        return (
            f'Model "{self.args[0]}" has no worker to serve describe request. '
            "Please use scale workers API to add workers."
        )


class ManagementDoor:
    """The routes of the management port."""

    def __init__(self, control: ControlPlane, settings: Settings) -> None:
        self._control = control
        self._limit = settings.inference.max_request_size

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        segments = exchange.segments
        if segments[:1] in ([], ["models"], ["experiments"], ["token"]):
            return True
        return segments[:2] == ["v1", "models"] and len(segments) == 3  # all of them are OpenAI's to list

    async def answer(self, exchange: Exchange) -> None:
        method = exchange.method
        self._admit(exchange)
        match exchange.segments:
            case []:
                if method != "OPTIONS":
                    raise MethodNotAllowed()
                await errors.reply_json(exchange, openapi.MANAGEMENT)
            case ["api-description"]:
                await errors.reply_json(exchange, openapi.MANAGEMENT)
            case ["token"]:
                await self._renew_key(exchange)
            case ["models"]:
                await self._models(exchange)
            case ["models", model]:
                await self._model(exchange, model, None)
            case ["models", model, "events"] if method == "GET":
                await events.stream(exchange, self._control, model)
            case ["models", model, "experiments"]:
                await experiments.of_model(exchange, self._control, model, self._limit)
            case ["experiments", *rest]:
                await experiments.by_id(exchange, self._control, rest, self._limit)
            case ["models", model, "rollout", *verb]:
                await rollout.answer(exchange, self._control, model, verb, self._limit)
            case ["models", model, "shadow"]:
                await shadow.answer(exchange, self._control, model)
            case ["models", model, "traffic"]:
                await traffic.answer(exchange, self._control, model, self._limit)
            case ["models", model, version]:
                await self._model(exchange, model, version)
            case ["models", model, version, "set-default"]:
                if method == "PUT":
                    await self._set_default(exchange, model, version)
                elif method == "OPTIONS":
                    await self._model(exchange, model, version)
                else:
                    raise MethodNotAllowed()
            case ["v1", "models", name]:
                if method != "GET":
                    raise MethodNotAllowed()
                await self._ready(exchange, name.partition(":")[0])
            case _:
                raise ResourceNotFound()

    def _admit(self, exchange: Exchange) -> None:
        """Look at the request's key, where one is wanted. Raises AccessDenied."""
        if exchange.segments == ["token"]:  # whatever the method: each of them makes a new key
            try:
                auth.admit(self._control.access, exchange, "token")
            except AccessDenied as error:
                raise TokenRefused(error.reason) from None
            return
        if exchange.method == "OPTIONS" or exchange.segments in ([], ["api-description"]):
            return
        if exchange.method in ("GET", "HEAD"):
            auth.admit(self._control.access, exchange, "observe")
        elif exchange.segments[:1] == ["experiments"] and exchange.segments[2:] == ["events"]:
            auth.admit(self._control.access, exchange, "manage", "infer")  # applications say what became of calls
        else:
            auth.admit(self._control.access, exchange, "manage")
        match exchange.segments:
            case ["models", model, *_] | ["v1", "models", model, *_]:
                auth.cover(exchange, model.partition(":")[0] if exchange.segments[0] == "v1" else model)

    async def _renew_key(self, exchange: Exchange) -> None:
        if self._control.access is None:
            raise ResourceNotFound()
        kind = _query(exchange).get("type")
        if kind != "inference" and kind != "management":
            raise TokenRefused("wrong_type")
        await self._control.renew_key(kind)
        await exchange.reply(200, [errors.JSON], b"\n")

    async def _models(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            await self._list(exchange)
        elif exchange.method == "POST":
            await self._register(exchange)
        else:
            raise MethodNotAllowed()

    async def _model(self, exchange: Exchange, model: str, version: str | None) -> None:
        if exchange.method == "GET":
            await self._describe(exchange, model, version)
        elif exchange.method == "PUT":
            await self._scale(exchange, model, version)
        elif exchange.method == "DELETE":
            await self._control.unregister(model, version)
            await _say(exchange, 200, f'Model "{model}" unregistered')
        elif exchange.method == "OPTIONS":
            await self._control.describe(model, version)
            await errors.reply_json(exchange, openapi.management_of(model))
        else:
            raise MethodNotAllowed()

    async def _list(self, exchange: Exchange) -> None:
        query = _query(exchange)
        limit = integer(query.get("limit"), PAGE)
        start = integer(query.get("next_page_token"), 0)
        await errors.reply_json(exchange, await listed(self._control, limit, start, auth.within(exchange)))

    async def _register(self, exchange: Exchange) -> None:
        parameters = await self._parameters(exchange)
        try:
            progress = await self._control.register(replace(registration(parameters), within=auth.within(exchange)))
        except MissingParameter:
            if "url" in parameters:
                raise ArchiveNotFound("empty url") from None
            raise
        await _say(exchange, *registered(progress))

    async def _parameters(self, exchange: Exchange) -> dict[str, str]:
        """The parameters of the query, the form or the JSON body. What the body says wins."""
        parameters = _query(exchange)
        body = await exchange.body(self._limit)
        content_type = exchange.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        if body and kind == "application/json":
            parameters.update(_json_parameters(body))
        elif kind in (forms.MULTIPART, forms.URLENCODED):
            fields = forms.inputs(content_type, body)
            parameters.update({field.name: field.value.decode("utf-8", "replace") for field in fields})
        return parameters

    async def _scale(self, exchange: Exchange, model: str, version: str | None) -> None:
        asked = await self._parameters(exchange)
        version = version or asked.get("model_version") or None
        scaling = {_OF_AUTOSCALING[key]: asked[key] for key in asked if key in _OF_AUTOSCALING}
        low: int | None = integer(asked.get("min_worker"), 1)
        high: int | None = integer(asked.get("max_worker"), low)
        if scaling and "min_worker" not in asked and "max_worker" not in asked:
            low = high = None  # the bounds stay as they are
        wait = truth(asked.get("synchronous"))
        try:
            progress = await self._control.scale(model, version, low, high, wait, scaling or None)
        except StartFailed as error:
            if version is None:  # TorchServe names the version only where the caller did
                raise type(error)(model, "null", error.detail) from None
            raise
        asked_for = progress.between[0] if low is None and progress.between is not None else low
        await _say(exchange, *scaled(progress, asked_for, version is not None))

    async def _set_default(self, exchange: Exchange, model: str, version: str) -> None:
        await self._control.set_default(model, version)
        await _say(exchange, 200, f'Default version successfully updated for model "{model}" to "{version}"')

    async def _describe(self, exchange: Exchange, model: str, version: str | None) -> None:
        if version == "all":
            found = await self._control.describe(model, every=True)
        elif truth(_query(exchange).get("customized")):
            try:
                found = await self._control.describe(model, version, customized=True)
            except NoWorker:
                raise NobodyDescribes(model) from None
        else:
            found = await self._control.describe(model, version)
        await errors.reply_json(exchange, [described(description) for description in found])

    async def _ready(self, exchange: Exchange, model: str) -> None:
        [description] = await self._control.describe(model)
        await errors.reply_json(exchange, {"name": model, "ready": description.status.phase in ("ready", "idle")})


async def listed(control: ControlPlane, limit: int, start: int, within: tuple[str, ...]) -> dict[str, Any]:
    """A page of the models whose names match ``within``."""
    limit = limit if 0 <= limit <= PAGE else PAGE
    page, following = await control.models(max(start, 0), limit, within)
    said: dict[str, Any] = {} if following is None else {"nextPageToken": str(following)}
    said["models"] = [{"modelName": name, "modelUrl": url} for name, url in page]
    return said


def registered(progress: Progress) -> tuple[int, str]:
    """The status and the sentence after a registration."""
    if progress.state == "done":
        ref, status = progress.ref, 200
        sentence = f'Model "{ref.name}" Version: {ref.version} registered with {progress.replicas} initial workers'
        if progress.replicas == 0 and progress.between is None:
            sentence += ". Use scale workers API to add workers for the model."
    else:
        status, sentence = _UNDER_WAY[progress.state]
    sentence += _autoscaling(progress)
    return status, f"{sentence.rstrip('.')}. {progress.advice}" if progress.advice else sentence


def scaled(progress: Progress, asked: int | None, named: bool) -> tuple[int, str]:
    """The status and the sentence after a change of workers; the version is in it where the caller ``named`` it."""
    status, sentence = _UNDER_WAY.get(progress.state, (200, ""))
    if progress.state == "done":
        version = f", version: {progress.ref.version}" if named else ""
        sentence = f"Workers scaled to {asked} for model: {progress.ref.name}{version}"
    return status, sentence + _autoscaling(progress)


def _autoscaling(progress: Progress) -> str:
    """What TorchServe's sentences go on with where autoscaling begins or ends."""
    if progress.between is not None:
        low, high = progress.between
        return f"; autoscaling holds between {low} and {high} workers from now on"
    if progress.was_between is not None:
        low, high = progress.was_between
        return f"; autoscaling between {low} and {high} workers is off from now on"
    return ""


_UNDER_WAY = {
    "processing": (202, "Processing worker updates..."),
    "partial": (206, "Workers scaling in progress..."),
}


def described(description: Description) -> dict[str, Any]:
    """A version in TorchServe's words, its fields in TorchServe's order; what it cannot say yet is off."""
    spec, status = description.spec, description.status
    said: dict[str, Any] = {
        "modelName": spec.name,
        "modelVersion": spec.version,
        "modelUrl": spec.url,
        "runtime": spec.runtime,
        "minWorkers": spec.min_workers,
        "maxWorkers": spec.max_workers,
        "batchSize": spec.batch_size,
        "maxBatchDelay": MAX_BATCH_DELAY if spec.max_batch_delay is None else spec.max_batch_delay,
        "responseTimeout": spec.response_timeout,
        "startupTimeout": spec.startup_timeout,
        "maxRetryTimeoutInSec": spec.max_retry_timeout,
        "clientTimeoutInMills": spec.client_timeout,
        "parallelType": spec.parallel_type,
        "parallelLevel": spec.parallel_level,
        "deviceType": spec.device_type or ("gpu" if spec.num_gpus else "cpu"),
    }
    if spec.device_ids:
        said["deviceIds"] = list(spec.device_ids)
    said |= {
        "continuousBatching": spec.continuous_batching,
        "useJobTicket": spec.use_job_ticket,
        "useVenv": spec.use_venv,
        "stateful": spec.sequence_batching,
        "sequenceMaxIdleMSec": spec.sequence_max_idle,
        "sequenceTimeoutMSec": spec.sequence_timeout,
        "maxNumSequence": spec.max_num_sequence,
        "maxSequenceJobQueueSize": spec.max_sequence_job_queue_size,
        "loadedAtStartup": spec.loaded_at_startup,
        "workers": [_worker(worker) for worker in status.workers],
        "jobQueueStatus": {
            "remainingCapacity": max(0, spec.job_queue_size * max(1, status.replicas) - description.pending),
            "pendingRequests": description.pending,
        },
    }
    if spec.scaling is not None:
        said["autoscaling"] = autoscaling.write(spec.scaling)
    if task := spec.config.get("task"):
        said["task"] = task
    if description.metadata is not None:
        said["customizedMetadata"] = description.metadata if isinstance(description.metadata, dict) else {}
    if status.last_error:
        said["lastError"] = status.last_error
        if status.error_time:
            said["lastErrorTime"] = _utc(status.error_time)
    return said


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "startTime": _utc(worker.started),
        "status": "READY" if worker.ready else "UNLOADING",
        "memoryUsage": worker.memory,
        "pid": worker.pid,
        "gpu": bool(worker.gpu),
        "gpuUsage": f"gpuId::{worker.gpu}" if worker.gpu else "N/A",
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def registration(parameters: Mapping[str, str]) -> Registration:
    """What the parameters ask for. A number that is none says nothing, as in TorchServe."""
    return Registration(
        url=parameters.get("url", ""),
        **{key: parameters.get(key) or None for key in _WORDS},
        **{key: integer(parameters.get(key), None) for key in COUNTS},
        wait=truth(parameters.get("synchronous", "true")),
        s3_sse_kms=truth(parameters.get("s3_sse_kms")),
        id=parameters.get("registration", "")[:_LONGEST_ID] or None,
    )


def integer(text: str | None, default: Any) -> Any:
    """The number that ``text`` is, as a 32-bit integer of Java's would read it, or ``default``."""
    if text is None or not _INTEGER.fullmatch(text) or len(text) > 11:
        return default
    number = int(text)
    return number if -(2**31) <= number < 2**31 else default


def truth(text: str | None) -> bool:
    return text is not None and text.lower() == "true"


def _json_parameters(body: bytes) -> dict[str, str]:
    """A JSON body's parameters as the text that a query would hold. Raises JsonSyntaxError."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise JsonSyntaxError(f"The body is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise JsonSyntaxError(f"The body must be a JSON object, and is a {type(said).__name__}.")
    return {key: _json_text(key, value) for key, value in said.items() if key in _KNOWN and value is not None}


def _json_text(key: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (dict, list)) or (key in _NUMBERS and integer(text, None) is None):
        wanted = "an integer" if key in _NUMBERS else "text"
        raise JsonSyntaxError(f"{key} must be {wanted}, and is {orjson.dumps(value).decode()}.")
    return text


def _query(exchange: Exchange) -> dict[str, str]:
    """The query's parameters; of a repeated one the first."""
    pairs = parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return dict(reversed(pairs))


async def _say(exchange: Exchange, status: int, sentence: str) -> None:
    await errors.reply_json(exchange, {"status": sentence}, status)
