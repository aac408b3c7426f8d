"""A model class in this process: the server's batcher and codecs, without Ray and without ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

import handlers
from handlers.errors import HandlerLoadError
from handlers.model_class import create_handler
from handlers.model_interface import OPTIONS, locate
from handlers.value_types import to_plain
from serve_app.client import errors as client_errors
from serve_app.client.predictions import Prediction
from serve_app.control.archive_ingestion import build_spec
from serve_app.domain.model import ModelSpec, Registration
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.errors import RelayError, StartFailed
from serve_app.model_store.archive import Archive, Manifest, convert_options, parse_options
from serve_app.protocols.http import json_errors
from serve_app.protocols.http.exchange import build_error_headers
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters

T = TypeVar("T")
ModelTarget = type | str | os.PathLike[str]


class LocalModel:
    """A loaded model class with its batcher, which belongs to the event loop of the first request.

    ``target`` is a class, or a file as ``model.py`` or ``model.py:ClassName``; ``options`` are those of the
    decorator, and replace them. Raises HandlerLoadError, ConfigurationError and StartFailed.
    """

    def __init__(self, target: ModelTarget, options: dict[str, Any]) -> None:
        entry, cls, directory = _load(target)
        self.spec = _build_spec(cls, options)
        self.input_type: str = entry.instance.input_type
        meters = Meters()
        metrics = meters.torchserve.cache(self.spec.name)
        runner = Runner(self.spec, directory, {}, Settings().runtime, metrics=metrics)
        self._handler_thread = HandlerThread()
        try:
            self._handler_thread.submit(runner.load, entry).result()
        except StartFailed as error:
            self._handler_thread.shutdown()
            raise HandlerLoadError(
                f"{locate(cls)}: {cls.__name__} cannot be set up.\n{error.detail}"
            ) from None
        self._batcher: RequestBatcher = create_row_batcher(
            runner, runner.run, self.spec, meters, self._handler_thread, lambda reason: None
        )

    async def request(self, body: Any, content_type: str) -> Prediction:
        """Return the response, of which a stream is collected. Raises the client's errors."""
        outcome = await self._submit(body, content_type)
        if isinstance(outcome, InferenceResponse):
            return _to_prediction(outcome, outcome.body)
        try:
            chunks = [chunk async for chunk in outcome]
        except RelayError as error:
            raise _to_client_error(error) from None
        return _to_prediction(outcome.head, b"".join(chunks))

    async def stream(self, body: Any, content_type: str) -> AsyncIterator[Any]:
        """Yield the pieces of a streamed response. Raises the client's errors."""
        outcome = await self._submit(body, content_type)
        if isinstance(outcome, InferenceResponse):
            yield decode(outcome.body, outcome.content_type or "")
            return
        try:
            async for chunk in outcome:
                if chunk:
                    yield decode(chunk, outcome.head.content_type or "")
        except RelayError as error:
            raise _to_client_error(error) from None
        finally:
            await outcome.aclose()

    async def close(self) -> None:
        await self._batcher.close()
        await asyncio.to_thread(self._handler_thread.shutdown)

    async def _submit(self, body: Any, content_type: str) -> InferenceResponse | ResponseStream:
        content, media_type = encode(body, content_type, self.input_type)
        part = InputPart("body", content, media_type)
        request = InferenceRequest(self.spec.name, self.spec.version, (part,), request_id=str(uuid.uuid4()))
        try:
            return await self._batcher.infer(request)
        except RelayError as error:
            raise _to_client_error(error) from None


class LocalClient:
    """A synchronous client of a model class in this process; several threads may use it."""

    def __init__(self, model: LocalModel, loop: asyncio.AbstractEventLoop) -> None:
        self._model = model
        self._loop = loop

    def predict(self, body: Any, content_type: str = "") -> Any:
        """Return the result: values of JSON, a text, or bytes.

        ``body`` is a pydantic model, an image, an array, text, bytes or values of JSON.
        """
        return decode_prediction(self.request(body, content_type))

    def request(self, body: Any, content_type: str = "") -> Prediction:
        """Return the response with its metadata."""
        return self._run(self._model.request(body, content_type))

    def stream(self, body: Any, content_type: str = "") -> Iterator[Any]:
        """Yield the pieces of a streamed response."""
        pieces = self._model.stream(body, content_type)
        try:
            while True:
                try:
                    yield self._run(_next_piece(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._run(_close_stream(pieces))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class AsyncLocalClient:
    """The methods of LocalClient for asyncio: they are awaited, streams are iterated with ``async for``."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def predict(self, body: Any, content_type: str = "") -> Any:
        """Return the result, as LocalClient.predict does."""
        return decode_prediction(await self.request(body, content_type))

    async def request(self, body: Any, content_type: str = "") -> Prediction:
        """Return the response with its metadata."""
        return await self._model.request(body, content_type)

    def stream(self, body: Any, content_type: str = "") -> AsyncIterator[Any]:
        """Yield the pieces of a streamed response."""
        return self._model.stream(body, content_type)


@contextlib.contextmanager
def local(target: ModelTarget, **options: Any) -> Iterator[LocalClient]:
    """Run a model class in this process, for tests and notebooks, and return its client.

    ``target`` is the class, or a file as ``model.py`` or ``model.py:ClassName``. ``options`` are those of
    ``torchrelay.model``, and replace them. Raises HandlerLoadError where the class cannot be served.
    """
    model = LocalModel(target, options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="local", daemon=True)
    thread.start()
    try:
        yield LocalClient(model, loop)
    finally:
        asyncio.run_coroutine_threadsafe(model.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@contextlib.asynccontextmanager
async def local_async(target: ModelTarget, **options: Any) -> AsyncIterator[AsyncLocalClient]:
    """Run a model class in this process on the caller's event loop, as ``local`` does."""
    model = await asyncio.to_thread(LocalModel, target, options)
    try:
        yield AsyncLocalClient(model)
    finally:
        await model.close()


def encode(body: Any, content_type: str, input_type: str) -> tuple[bytes, str]:
    """Return the bytes of a request and their content type; ``input_type`` is the model's."""
    plain = to_plain(body)
    if isinstance(plain, bytes):
        return plain, content_type or "application/octet-stream"
    if isinstance(plain, str) and not input_type.startswith("application/json"):
        return plain.encode(), content_type or "text/plain"
    if isinstance(plain, (np.ndarray, np.generic)):
        plain = plain.tolist()
    return json.dumps(plain).encode(), content_type or "application/json"


def decode(body: bytes, content_type: str) -> Any:
    """Return values of JSON, a text, or bytes, by the content type."""
    media_type = content_type.partition(";")[0]
    if media_type == "application/json":
        return json.loads(body)
    return body.decode() if media_type.startswith("text/") else body


def decode_prediction(prediction: Prediction) -> Any:
    return decode(prediction.body, prediction.content_type)


def _load(target: ModelTarget) -> tuple[handlers.LoadedHandler, type, Path]:
    """Return the handler of a model class, the class, and the folder of its file."""
    if isinstance(target, type):
        module = sys.modules.get(target.__module__)
        file = getattr(module, "__file__", None)
        folder = Path(file).parent if file else Path.cwd()
        return handlers.LoadedHandler(instance=create_handler(target)), target, folder
    path, separator, name = str(target).partition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise HandlerLoadError(f"{file} does not exist. Name a Python file, or pass the class.")
    entry = handlers.load(f"{file.name}{separator}{name}", file.parent, {})
    cls = getattr(entry.instance, "model_class", None)
    if cls is None:
        raise HandlerLoadError(
            f"{file}: this is a handler without predict. Name a class with predict, or use handlers.load."
        )
    return entry, cls, file.parent


def _build_spec(cls: type, options: dict[str, Any]) -> ModelSpec:
    where = locate(cls)
    config = convert_options({**getattr(cls, OPTIONS, {}), **options}, where)
    return build_spec(
        Registration("local"),
        Archive(where, Path(), Manifest(cls.__name__, handler=cls.__name__)),
        parse_options(config, where),
        Settings(),
        at_startup=True,
    )


def _to_prediction(head: InferenceResponse, body: bytes) -> Prediction:
    headers = httpx.Headers([*head.headers, ("x-model-version", head.version)])
    if head.content_type:
        headers["content-type"] = head.content_type
    if head.status >= 400:
        raise client_errors.from_response(httpx.Response(head.status, headers=headers, content=body))
    return Prediction(body, head.status, headers)


def _to_client_error(error: RelayError) -> client_errors.ServerError:
    """Return the error that a client of a server gets, with the handler's whole traceback."""
    status, _ = json_errors.look_up(error)
    document = json_errors.to_document(error, handler_errors="traceback")
    return client_errors.from_response(
        httpx.Response(status, headers=build_error_headers(error), json=document)
    )


async def _next_piece(pieces: AsyncIterator[Any]) -> Any:
    return await anext(pieces)


async def _close_stream(pieces: Any) -> None:
    await pieces.aclose()
