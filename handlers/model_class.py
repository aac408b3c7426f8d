"""Handlers of plain model classes: ``setup(context)``, then ``predict(request)`` or ``predict_batch``.

The annotations of the method define how requests are parsed and validated, and how results are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import CodeType
from typing import Any, TypeVar, cast, overload

import numpy as np

from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading.code_reload import CodeReloader, ReloadReport, create_reloader
from handlers.model_interface import KEEP, OPTIONS, ModelInterface, locate, read_interface
from handlers.tensor_batch import is_tensor_batch
from handlers.value_types import Json, ValueType, to_plain, to_tensors

T = TypeVar("T", bound=type)
_PNG = b"\x89PNG\r\n"


@overload
def model(cls: T, /) -> T: ...
@overload
def model(**options: Any) -> Callable[[T], T]: ...
def model(cls: T | None = None, /, **options: Any) -> T | Callable[[T], T]:
    """Set keys of model-config.yaml on a model class: ``@model(batch_size=8, num_gpus=0.5, replicas=2)``.

    A key is written as in the file, or in lower case with underscores. ``replicas`` is their number.
    Archives and servers read the keys; a model-config.yaml takes precedence.
    """

    def decorate(decorated: T) -> T:
        setattr(decorated, OPTIONS, options)
        return decorated

    return decorate if cls is None else decorate(cls)


class ModelClassHandler:
    """A handler that calls a model class; ``create_handler`` selects the one for its interface.

    ``input_type``, ``signature`` and ``schemas`` are read from the annotations.
    """

    takes_tensors = True

    def __init__(self, cls: type, interface: ModelInterface) -> None:
        self._cls = cls
        self._interface = interface
        self._model: Any = None
        self._context: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of an asynchronous setup or predict_batch
        self._reloader: CodeReloader | None = None
        self.input_type = interface.input.media_type
        self.signature = interface.signature
        self.schemas = interface.schemas

    @property
    def model_class(self) -> type:
        """The class that is served now."""
        return self._cls

    def initialize(self, context: Any) -> None:
        self._context = context
        self._model = _create_model(self._cls)
        self._wait(_call_setup(self._model, context))
        self._watch(context)

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Return one value or one exception for each row of ``data``."""
        model, interface = self._model, self._interface  # a reload replaces them between two batches
        if (values := _answer_special(data, context, interface, self.schemas)) is not None:
            return values
        batch = _RequestBatch(data, context, interface)
        if interface.is_batch:
            results = self._wait(model.predict_batch(list(batch.requests.values()))) if batch.requests else []
            batch.add_results(results, model)
        else:
            for index, request in batch.requests.items():
                with batch.row(index):
                    batch.add_result(index, model.predict(request))
        batch.stream()
        return batch.values

    def _wait(self, result: Any) -> Any:
        """Return a result, after awaiting it where it is a coroutine or an asynchronous generator."""
        if inspect.isasyncgen(result):
            return _iterate(result, self._get_loop())
        return self._get_loop().run_until_complete(result) if inspect.isawaitable(result) else result

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop

    # Reloads

    def _watch(self, context: Any) -> None:
        self._reloader = create_reloader(
            context.model_yaml_config.get("reload"), context.model_dir, self._replace
        )

    def _replace(self, cls: type) -> ReloadReport:
        """Serve ``cls`` from the next batch on, in the reloader's thread. Raises the class's errors."""
        started = time.perf_counter()
        interface = read_interface(cls)
        if type(create_handler(cls)) is not type(self):
            raise HandlerLoadError(
                f"{locate(getattr(cls, interface.method))}: predict has become "
                f"{'async' if interface.is_async else 'synchronous'}. Start the server again."
            )
        model = _create_model(cls)
        kept = _keep(self._model, model)
        if not kept:
            self._run_setup(_call_setup(model, copy.copy(self._context)))
        notes = []
        if interface.schemas != self.schemas or interface.signature != self.signature:
            notes.append("its types have changed, and descriptions show the old ones until the next start")
        if getattr(cls, OPTIONS, {}) != getattr(self._cls, OPTIONS, {}):
            notes.append("its options have changed, and apply from the next start on")
        self._cls, self._model, self._interface = cls, model, interface
        return ReloadReport(True, time.perf_counter() - started, kept=kept, message="; ".join(notes))

    def _run_setup(self, result: Any) -> None:
        if inspect.isawaitable(result):
            asyncio.run(cast("Coroutine[Any, Any, None]", result))


class AsyncModelClassHandler(ModelClassHandler):
    """A handler of a class with ``async def predict``: requests overlap, each as a batch of its own."""

    async def initialize(self, context: Any) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._model = _create_model(self._cls)
        if inspect.isawaitable(result := _call_setup(self._model, context)):
            await result
        self._watch(context)

    async def handle(self, data: list[Any], context: Any) -> list[Any]:  # type: ignore[override]
        model, interface = self._model, self._interface
        if (values := _answer_special(data, context, interface, self.schemas)) is not None:
            return values
        batch = _RequestBatch(data, context, interface)
        await asyncio.gather(*(self._predict(model, batch, index) for index in batch.requests))
        return batch.values

    async def _predict(self, model: Any, batch: _RequestBatch, index: int) -> None:
        with batch.row(index):
            result = model.predict(batch.requests[index])
            if inspect.isawaitable(result):
                result = await result
            if isinstance(result, AsyncIterator):
                async with contextlib.aclosing(cast("Any", result)) as pieces:
                    async for piece in pieces:
                        batch.add_piece(index, piece)
                batch.end_stream(index)
            else:
                batch.add_result(index, result)
                batch.stream()

    def _run_setup(self, result: Any) -> None:
        if inspect.isawaitable(result):
            assert self._loop is not None
            coroutine = cast("Coroutine[Any, Any, None]", result)
            asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def create_handler(cls: type) -> ModelClassHandler:
    """Return the handler of a model class. Raises HandlerLoadError where its interface is invalid."""
    interface = read_interface(cls)
    overlaps = interface.is_async and not interface.is_batch
    return (AsyncModelClassHandler if overlaps else ModelClassHandler)(cls, interface)


class _RequestBatch:
    """The requests of a batch by row, and the values or errors of all rows."""

    def __init__(self, data: list[Any], context: Any, interface: ModelInterface) -> None:
        self.values: list[Any] = [None] * len(data)
        self.requests: dict[int, Any] = {}
        self._context = context
        self._output = interface.output
        self._has_tensors = is_tensor_batch(data)
        self._streams: dict[int, Iterator[Any]] = {}
        self._pieces: dict[int, list[Any]] = {}  # of rows of tensors, which are not streamed
        for index, row in enumerate(data):
            try:
                self.requests[index] = _read(interface.input, row, self._has_tensors)
            except PredictionException as error:
                self.values[index] = error

    @contextlib.contextmanager
    def row(self, index: int) -> Iterator[None]:
        """Make an exception that of the row alone."""
        try:
            yield
        except Exception as error:
            self.values[index] = error

    def add_results(self, results: Any, model: Any) -> None:
        """Add the results of predict_batch, one for each request, or an iterator of lists of pieces."""
        if _is_stream(results):
            for pieces in results:
                for index, piece in zip(self.requests, self._check_length(pieces, model)):
                    self.add_piece(index, piece)
            for index in self.requests:
                self.end_stream(index)
            return
        for index, result in zip(self.requests, self._check_length(results, model)):
            with self.row(index):
                self.add_result(index, result)

    def add_result(self, index: int, result: Any) -> None:
        if isinstance(result, Exception):
            self.values[index] = result
        elif _is_stream(result):
            self._streams[index] = iter(result)
        else:
            self.values[index] = self._write(index, result)

    def stream(self) -> None:
        """Send the pieces of all streams as they are made, in turns."""
        while self._streams:
            for index, pieces in list(self._streams.items()):
                with self.row(index):
                    try:
                        self.add_piece(index, next(pieces))
                        continue
                    except StopIteration:
                        self.end_stream(index)
                del self._streams[index]

    def add_piece(self, index: int, piece: Any) -> None:
        """Send a piece of a streamed result; values of JSON are lines."""
        if self._has_tensors:
            self._pieces.setdefault(index, []).append(piece)
            return
        value = self._write(index, piece)
        if not isinstance(value, (str, bytes)):
            value = json.dumps(value.tolist() if isinstance(value, np.ndarray) else value) + "\n"
        self._context.emit(index, value)

    def end_stream(self, index: int) -> None:
        pieces = self._pieces.pop(index, [])
        is_text = all(isinstance(piece, str) for piece in pieces)
        self.values[index] = "".join(pieces) if is_text else to_tensors(to_plain(pieces[-1]))

    def _write(self, index: int, result: Any) -> Any:
        if self._has_tensors:
            return self._output.write_tensors(result)
        value = self._output.write(result)
        if self._context.get_response_content_type(index) is None:
            self._context.set_response_content_type(index, _media_type(value))
        return value

    def _check_length(self, results: Any, model: Any) -> Any:
        count = len(self.requests)
        if count == 0:
            return []
        if not isinstance(results, (list, tuple)) and np.ndim(results) == 0:
            problem = f"returned {type(results).__name__}, and must return a list of {count} results"
        elif len(results) != count:
            problem = f"got {count} requests and returned {len(results)} results"
        else:
            return results
        raise TypeError(f"{locate(type(model).predict_batch)}: predict_batch {problem}.")


def _read(input_type: ValueType, row: Any, has_tensors: bool) -> Any:
    if has_tensors:
        return input_type.parse_tensors(row)
    if not isinstance(row, Mapping):
        return input_type.parse(row)
    if len(row) == 1 and (name := next(iter(row))) in ("body", "data"):
        return input_type.parse(row[name])
    try:
        return input_type.parse(dict(row))
    except PredictionException as error:
        # What `curl -d` sends without a header is a form, whose first field is named by the document.
        if not next(iter(row), "").lstrip().startswith(("{", "[")):
            raise
        hint = "The request is a form; for JSON, send the header Content-Type: application/json."
        message = error.message.rstrip(".")
        raise PredictionException(f"{message}. {hint}", error.error_code) from None


def _answer_special(
    data: list[Any], context: Any, interface: ModelInterface, schemas: Json
) -> list[Any] | None:
    """Return the values of a batch of descriptions or explanations; None for one of predictions."""
    if context.get_request_header(0, "describe") == "True":
        return [schemas] * len(data)
    if context.get_request_header(0, "explain") == "True":
        error = PredictionException(
            f"A model class with {interface.method} cannot be explained: write a handler with get_insights.",
            501,
        )
        return [error] * len(data)
    return None


def _create_model(cls: type) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise HandlerLoadError(
            f"{locate(cls)}: {cls.__name__}() failed: {error}. The class is created without arguments; "
            "read files and options in setup(self, context)."
        ) from error


def _call_setup(model: Any, context: Context) -> Any:
    """Call ``setup`` with the context, or without where it takes none; return a coroutine unawaited."""
    setup = getattr(model, "setup", None)
    if setup is None:
        return None
    return setup(context) if inspect.signature(setup).parameters else setup()


def _keep(old: Any, new: Any) -> list[str]:
    """Copy the attributes that the class keeps, where its ``setup`` has the same code; return their names."""
    names = list(getattr(type(new), KEEP, ()))
    setups = [getattr(getattr(type(model), "setup", None), "__code__", None) for model in (old, new)]
    if not names or None in setups or _code_key(setups[0]) != _code_key(setups[1]):
        return []
    if not all(hasattr(old, name) for name in names):
        return []
    for name in names:
        setattr(new, name, getattr(old, name))
    return names


def _code_key(code: Any) -> Any:
    """Return what a code object does, without its place in the file."""
    if not isinstance(code, CodeType):
        return code
    return code.co_code, code.co_names, code.co_varnames, tuple(map(_code_key, code.co_consts))


def _is_stream(result: Any) -> bool:
    return isinstance(result, Iterator)


def _iterate(pieces: Any, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Iterate over an asynchronous generator on a loop that does not run."""
    try:
        while True:
            yield loop.run_until_complete(anext(pieces))
    except StopAsyncIteration:
        return
    finally:
        loop.run_until_complete(pieces.aclose())


def _media_type(value: Any) -> str:
    if isinstance(value, str):
        return "text/plain; charset=utf-8"
    if isinstance(value, bytes):
        return "image/png" if value.startswith(_PNG) else "application/octet-stream"
    return "application/json"
