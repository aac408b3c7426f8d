"""One model in this process: loaded, warmed, and asked for batches.

Every method belongs in the author's thread: they block, and they run what the author wrote.
"""

from __future__ import annotations

import gc
import logging
import mimetypes
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import handlers
from handlers import torchserve_names
from handlers.context import Context, Row
from handlers.errors import PredictionException
from serve_app.errors import (
    CountMismatch,
    HandlerFailed,
    HandlerSaid,
    InvalidOutput,
    OutOfResources,
    RelayError,
    StartFailed,
    StartOutOfMemory,
)
from serve_app.runtime import rows
from serve_app.settings import RuntimeSettings
from serve_app.types import Call, Input, ModelSpec, Reply

log = logging.getLogger("torchrelay.runner")

_OURS = (__file__, handlers.__file__)
_NOT_AMONG_HEADERS = {"content-type", "ts_stream_next"}  # a field of its own; and a door's word, not a handler's
# Seconds that a thread may keep the interpreter from another that waits for it. With Python's 5 ms the
# author's thread, which lets go of it at every operation of torch, is kept waiting by a busy event loop.
_TURN = 0.001
_SAY_AGAIN = 60.0  # seconds after which a traceback that stays the same is logged in full once more


class Runner:
    """A version's handler over the files in ``directory``; one answer or one error for each row it is given."""

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path,
        manifest: dict[str, Any],
        settings: RuntimeSettings,
        gpu_id: int | None = None,
    ) -> None:
        self._spec = spec
        self._directory = Path(directory)
        self._manifest = manifest
        self._decoded = settings.decode_input_request
        self._context = Context(
            spec.name,
            str(directory),
            manifest,
            batch_size=spec.batch_size,
            gpu_id=gpu_id,
            limit_max_image_pixels=settings.limit_max_image_pixels,
            model_yaml_config=dict(spec.config),
        )
        self._handle: Callable[[list[dict[str, Any]], Context], Any] | None = None
        self._prepare_row: Callable[[Any], Any] | None = None
        self._preparing: ThreadPoolExecutor | None = None
        self._logged: tuple[str, float] = ("", 0.0)

    def load(self) -> None:
        """Import the handler and let it load its model. Raises StartFailed or StartOutOfMemory.

        From here on this process is the model's: the names that archives import are TorchServe's too,
        the working directory is the archive's, and threads change over more often.
        """
        sys.setswitchinterval(_TURN)
        try:
            torchserve_names.install()
            os.chdir(self._directory)
            entry = handlers.load(self._spec.handler, self._directory, self._manifest)
            entry.initialize(self._context)
        except BaseException as error:
            raise self._start_failed(_traceback(error), _out_of_memory(error)) from None
        self._handle = entry
        self._prepare_row = getattr(entry.instance, "prepare_row", None)
        if self._prepare_row is not None:
            self._preparing = ThreadPoolExecutor(_cores(), thread_name_prefix="prepare")

    @property
    def prepare(self) -> Callable[[Call], Future[Any]] | None:
        """Begins a call's row ahead of its batch, from any thread; ``run`` takes the future. None: nothing to begin."""
        return self._begin if self._preparing is not None else None

    def _begin(self, call: Call) -> Future[Any]:
        assert self._preparing is not None and self._prepare_row is not None
        return self._preparing.submit(rows.prepared, call, self._decoded, self._prepare_row)

    def warm_up(self) -> None:
        """Answer the archive's sample requests, each alone and then a full batch of them. Raises StartFailed.

        ``samples:`` in model-config.yaml names their files; without it they are what lies in the
        archive's ``samples/``. Ends with everything that loading made set aside from garbage
        collection, which otherwise walks through it again and again, tens of milliseconds a time.
        """
        samples = [(file, self._sample(file)) for file in self._sample_files()]
        for file, call in samples:
            self._try(f"sample {file}", [call])
        size = self._spec.batch_size
        if samples and size > 1:
            self._try(f"a batch of {size} samples", [samples[i % len(samples)][1] for i in range(size)])
        gc.collect()
        gc.freeze()

    def run(
        self,
        calls: Sequence[Call],
        emit: Callable[[int, bytes | Reply], None],
        ahead: Sequence[Future[Any] | None] = (),
    ) -> list[Reply | RelayError]:
        """One reply or one error for each call, all of one kind; raises nothing.

        ``ahead`` has what ``prepare`` gave for each call, or None; empty where nothing was begun.

        An error that stands for the whole batch is one object in every place. ``emit(index, piece)``
        takes the intermediate pieces of a row: first a Reply that has the row's status and headers,
        then bytes; it may be called from any thread that the author started.
        """
        failures: list[str] = []
        results = self._answer(calls, emit, failures, ahead)
        for failure in failures:
            self._report(calls, failure)
        return results

    def _answer(
        self,
        calls: Sequence[Call],
        emit: Callable[[int, bytes | Reply], None],
        failures: list[str],
        ahead: Sequence[Future[Any] | None] = (),
    ) -> list[Reply | RelayError]:
        context = self._context
        streamed: set[int] = set()
        broken: dict[int, RelayError] = {}  # rows whose stream ended in an error

        def on_emit(index: int, value: Any) -> None:
            if index in broken:
                return
            piece = self._reply(index, value, failures)
            if not isinstance(piece, Reply):
                broken[index] = piece
            elif index in streamed:
                emit(index, piece.body)
            else:
                streamed.add(index)
                emit(index, piece)

        assert self._handle is not None, "load() comes first"
        try:
            if ahead:
                data = [self._row(call, begun) for call, begun in zip(calls, ahead, strict=True)]
            else:
                data = [rows.row(call, self._decoded) for call in calls]
            context.begin(
                [call.request_id for call in calls],
                [rows.headers(call) for call in calls],
                [rows.parameters(call) for call in calls],
                on_emit,
            )
            values = self._handle(data, context)
        except BaseException as error:  # SystemExit too: an author's code does not end the thread
            return [_failure(error, failures)] * len(calls)
        if not isinstance(values, list):
            detail = f"a handler returns a list with one element a row, this one returned {type(values).__name__}"
            failures.append(detail)
            return [InvalidOutput(detail)] * len(calls)
        if len(values) != len(calls):
            detail = f"the handler got {len(calls)} rows and returned {len(values)} elements"
            failures.append(detail)
            return [CountMismatch(detail)] * len(calls)
        if broken:
            return [broken.get(i) or self._reply(i, value, failures) for i, value in enumerate(values)]
        return [self._reply(i, value, failures) for i, value in enumerate(values)]

    def _row(self, call: Call, begun: Future[Any] | None) -> Any:
        if begun is None or begun.cancel():  # no thread has got to it: the handler does it itself
            return Row(rows.row(call, self._decoded))
        return begun.result()

    def _reply(self, index: int, value: Any, failures: list[str]) -> Reply | RelayError:
        if isinstance(value, Exception):
            return _failure(value, failures)
        try:
            body = rows.encode(value)
        except RelayError as error:
            failures.append(str(error.args[0]))
            return error
        except MemoryError as error:
            return _failure(error, failures)
        status, phrase = self._context.get_response_status(index)
        named = self._context.get_response_headers(index)
        if not named:
            return Reply(body, None, status, phrase, (), self._spec.version)
        others = tuple((name, str(value)) for name, value in named.items() if name.lower() not in _NOT_AMONG_HEADERS)
        content_type = self._context.get_response_content_type(index)
        return Reply(body, content_type, status, phrase, others, self._spec.version)

    def _report(self, calls: Sequence[Call], failure: str) -> None:
        """Log it in full, unless it was said just now: a batch that runs again in halves fails the same way."""
        known, when = self._logged
        now = time.monotonic()
        ids = ", ".join(call.request_id for call in calls)
        if failure == known and now - when < _SAY_AGAIN:
            log.error("%s: the same failure again (requests %s)", self._spec.ref.app, ids)
            return
        self._logged = (failure, now)
        log.error("%s: the handler failed (requests %s)\n%s", self._spec.ref.app, ids, failure)

    # Samples

    def _sample_files(self) -> list[str]:
        named = self._spec.config.get("samples")
        if named is None:
            folder = self._directory / "samples"
            if not folder.is_dir():
                return []
            return sorted(f"samples/{file.name}" for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise self._start_failed(f"model-config.yaml: samples is a list of file names, not {named!r}")
        return named

    def _sample(self, name: str) -> Call:
        root = self._directory.resolve()
        file = (root / name).resolve()
        if not file.is_relative_to(root):
            raise self._start_failed(f"sample {name}: the file lies outside the archive; pack it with --extra-files")
        try:
            body = file.read_bytes()
        except OSError as error:
            cure = "pack it with --extra-files, or take it off samples: in model-config.yaml"
            raise self._start_failed(f"sample {name}: {error.strerror}; {cure}") from None
        media_type = mimetypes.guess_type(file.name)[0]
        inputs = (Input("body", body, media_type),)
        return Call(self._spec.name, self._spec.version, inputs, request_id=f"sample {name}")

    def _try(self, what: str, calls: list[Call]) -> None:
        for result in self._answer(calls, lambda index, piece: None, []):
            if isinstance(result, RelayError):
                detail = getattr(result, "detail", "")
                raise self._start_failed(f"{what}: {result}\n{detail}", isinstance(result, OutOfResources))

    def _start_failed(self, why: str, out_of_memory: bool = False) -> StartFailed:
        failed = StartOutOfMemory if out_of_memory else StartFailed
        return failed(self._spec.name, self._spec.version, why)


def _failure(error: BaseException, failures: list[str]) -> HandlerFailed:
    """What a caller is told of what an author's code raised."""
    if isinstance(error, PredictionException):
        return HandlerSaid(error.message, error.error_code)
    text = _traceback(error)
    failures.append(text)
    # TorchServe's rule: whatever speaks of CUDA is taken for an exhausted device.
    if _out_of_memory(error) or "CUDA" in str(error):
        return OutOfResources(text)
    return HandlerFailed(text)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether the host's memory or the device's ran out, here or in what this error was raised from."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if "CUDA" in text and "out of memory" in text:
            return True
        error = error.__cause__
    return False


def _traceback(error: BaseException) -> str:
    """The traceback from the author's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
