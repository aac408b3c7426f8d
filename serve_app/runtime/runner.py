"""Runner of one model in this process: loads it, warms it up and runs batches.

Every method belongs in the handler thread: they block, and they run the author's code.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import logging
import mimetypes
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

import handlers
from handlers import profiling
from handlers.context import Context
from handlers.loading.extension_points import get_extension
from handlers.metrics import MetricCache, suppress_updates
from handlers.torchserve_compat import names as torchserve_names
from serve_app.domain import signature
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseChunk
from serve_app.domain.signature import Signature
from serve_app.errors import BadRequest, HandlerOutOfMemory, RelayError, StartFailed, StartOutOfMemory
from serve_app.runtime import codec
from serve_app.runtime.adapters import HandlerAdapters
from serve_app.runtime.batch_execution import BatchExecution, DecodeStep, format_traceback, is_out_of_memory
from serve_app.runtime.batching.request_queue import Emit
from serve_app.runtime.codec import TensorRowCodec
from serve_app.runtime.host import cpu_affinity, malloc, thread_limits
from serve_app.settings import RuntimeSettings
from serve_app.telemetry import logs, tracing

log = logging.getLogger(__name__)
_NO_SPAN = nullcontext()

# Seconds that a thread may keep the interpreter from another that waits for it. With Python's 5 ms the
# author's thread, which lets go of it at every operation of torch, is kept waiting by a busy event loop.
SWITCH_INTERVAL_S = 0.001
_MAX_SCHEMA_BYTES = 1 << 15  # of a version; every replica and gateway has those of all versions
_LOG_REPEAT_S = 60.0  # seconds after which a traceback that stays the same is logged in full once more


class Runner:
    """A runner of a version's handler in ``directory``; each row gets one response or one error."""

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path,
        manifest: dict[str, Any],
        settings: RuntimeSettings,
        gpu_id: int | None = None,
        metrics: MetricCache | None = None,
        profiles: Path | None = None,
    ) -> None:
        self._spec = spec
        self._directory = Path(directory)
        self._manifest = manifest
        self._context = Context(
            spec.name,
            str(directory),
            manifest,
            batch_size=spec.batch_size,
            gpu=gpu_id,
            limit_max_image_pixels=settings.limit_max_image_pixels,
            model_yaml_config=spec.handler_config,
            metrics=metrics,
        )
        self._context.header_key_sequence_id = settings.header_key_sequence_id
        self._context.header_key_sequence_start = settings.header_key_sequence_start
        self._context.header_key_sequence_end = settings.header_key_sequence_end
        self._gpu = gpu_id
        self._profiles = profiles
        self._max_response_size = settings.max_response_size
        self._pin = settings.pin
        self._envelope = spec.config.get("envelope") or ("" if spec.tensors else settings.service_envelope)
        self._settings = settings
        self._tensor_codec = TensorRowCodec(decoded=settings.decode_input_request)
        self.signature: Signature | None = spec.signature  # that of the handler where the archive has none
        self.input_type = ""  # the media type of a row that the handler declares
        self.schemas: Mapping[str, Any] | None = None  # the JSON schemas that a model class declares
        self._handle: Callable[[list[dict[str, Any]], Context], Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # of an asynchronous handler; set by ``load``
        self._check: Callable[[], Coroutine[Any, Any, None]] | None = None  # of an asynchronous handler
        self._prepare_row: Callable[[Any], Any] | None = None
        self._measure_length: Callable[[Any], int] | None = None
        self._prepare_pool: ThreadPoolExecutor | None = None
        self._logged: tuple[str, float] = ("", 0.0)
        self._execution_class = DecodeStep if spec.continuous_batching else BatchExecution
        self._sequence_ended: Callable[[str, str], Any] | None = None
        self.adapters: HandlerAdapters | None = None  # set by ``load`` where the handler has adapters

    def _runs_code(self) -> bool:
        """Return whether the model may run code of its own: archives and workflows, else if trusted."""
        spec = self._spec
        return bool(self._manifest) or spec.graph is not None or spec.config.get("trusted") is True

    def load(self, entry: handlers.LoadedHandler | None = None) -> None:
        """Import the handler and let it load its model. Raises StartFailed or StartOutOfMemory.

        From here on the process belongs to the model: archives can import TorchServe's names too, the working
        directory is the archive's, and threads switch more often. ``entry`` is a handler of this process
        itself, which stays as it is.
        """
        available = thread_limits.available_cores()  # before the model's threads are pinned to some of them
        try:
            if entry is None:
                runs_code = self._runs_code()
                self._prepare_process(available, runs_code)
                entry = handlers.load(self._spec.handler, self._directory, self._manifest, runs_code)
            if entry.is_async:
                self.loop = asyncio.new_event_loop()
                self.loop.run_until_complete(_initialize(entry, self._context))
                check = get_extension(entry.instance, "check_health")
                self._check = check if inspect.iscoroutinefunction(check) else None
            else:
                entry.initialize(self._context)
            enveloped = handlers.load_envelope(self._envelope)(entry) if self._envelope else entry
            self._handle = enveloped.handle
        except BaseException as error:
            raise self._start_failed(format_traceback(error), is_out_of_memory(error)) from None
        self._tensor_codec = self._make_codec(entry.instance)
        if not self._envelope:  # a handler behind one never sees the row as it came
            self._prepare_row = get_extension(entry.instance, "prepare_row")
            length = get_extension(entry.instance, "length") if self._spec.bucket_by_length else None
            self._measure_length = length if callable(length) else None
            if callable(allow_arrays := get_extension(entry.instance, "allow_array_outputs")):
                allow_arrays()
        if self.loop is not None and get_extension(entry.instance, "load_adapter"):
            self.adapters = HandlerAdapters(entry.instance, self.loop)
        ended = get_extension(entry.instance, "sequence_ended")
        self._sequence_ended = ended if callable(ended) else None
        if self.loop is not None:
            self._execution_class = BatchExecution  # an asynchronous handler streams by itself
        if (self._prepare_row is not None or self._measure_length is not None) and self.loop is None:
            self._prepare_pool = ThreadPoolExecutor(available, thread_name_prefix="prepare")

    def _prepare_process(self, available: int, runs_code: bool) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        torchserve_names.install()
        if runs_code:  # a child process that runs a module imports from its working directory first
            os.chdir(self._directory)
            os.environ["PYTHONPATH"] = f"{self._directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        pinned = self._spec.config.get("pin", self._pin and self._gpu is None)
        if (number := thread_limits.intra_op_threads(self._spec, available, pinned)) is not None:
            thread_limits.set_threads(number)
            if pinned:
                cpu_affinity.pin(number, self._spec.ref.app)
        else:
            thread_limits.apply_environment()
        thread_limits.limit_tokenizers()
        if self._gpu is not None and 0 < self._spec.num_gpus < 1:
            from handlers.loading import device  # torch, which most processes of CPU models never import

            device.limit_gpu_memory(self._gpu, self._spec.num_gpus)

    @property
    def prepare(self) -> Callable[[InferenceRequest], Future[Any]] | None:
        """A function that prepares a request's row before its batch, in any thread; ``run`` takes the future.

        None where there is nothing to prepare.
        """
        return self._submit_prepare if self._prepare_pool is not None else None

    @property
    def handles_sequence_end(self) -> bool:
        """Return whether the handler has a method ``sequence_ended(sequence_id, why)``."""
        return self._sequence_ended is not None

    def sequence_ended(self, name: str, why: str) -> None:
        """Call the handler's ``sequence_ended``; log an exception."""
        assert self._sequence_ended is not None
        try:
            self._sequence_ended(name, why)
        except Exception as error:
            log.error(
                "%s: sequence_ended(%r, %r) failed\n%s",
                self._spec.ref.app,
                name,
                why,
                format_traceback(error),
            )

    def _submit_prepare(self, request: InferenceRequest) -> Future[Any]:
        assert self._prepare_pool is not None
        return self._prepare_pool.submit(
            codec.prepare_row, request, self._tensor_codec.read, self._prepare_row, self._measure_length
        )

    def warm_up(self) -> None:
        """Run the archive's sample requests, each alone and then a full batch of them. Raises StartFailed.

        ``samples:`` in model-config.yaml names their files; without it they are the files in the archive's
        ``samples/``. A compiled model runs smaller batches too. At the end ``profile:`` is ready to record.
        """
        samples = [(file, self._sample(file)) for file in self._sample_files()]
        with suppress_updates():
            for file, request in samples:
                self._run_samples(f"sample {file}", [request])
            size = self._spec.batch_size
            for count in self._warm_up_sizes(size) if samples else ():
                self._run_samples(
                    f"a batch of {count} samples", [samples[i % len(samples)][1] for i in range(count)]
                )
        self._profile()
        self._tune_process()

    def _tune_process(self) -> None:
        """Exclude all present objects from garbage collection, and keep the heap for the batches.

        A collection otherwise scans them again and again, tens of milliseconds a time.
        """
        gc.collect()
        gc.freeze()
        malloc.tune()

    def run(
        self,
        requests: Sequence[InferenceRequest],
        emit: Emit,
        prepared: Sequence[Future[Any] | None] = (),
    ) -> list[InferenceResponse | RelayError]:
        """Return one response or one error for each request, all of one kind; raises nothing.

        ``prepared`` has the future of ``prepare`` for each request, or None; it is empty where nothing was
        prepared.

        An error of the whole batch is one object for all rows. ``emit(index, chunk)`` receives the
        intermediate chunks of a row: first an InferenceResponse with the row's status and headers, then
        bytes. Any thread of the handler may call it.
        """
        execution = self._execution(self._context, requests, emit)
        # A tuple of a list takes half the time of one of a generator, here 0.5 µs for each batch.
        token = logs.REQUESTS.set(tuple([request.request_id for request in requests]))
        if tracing.has_traced(requests):
            with self._trace(requests):
                results = self._execute(execution, prepared)
        else:
            results = self._execute(execution, prepared)
        logs.REQUESTS.reset(token)
        if execution.failures:
            self._log_failures(execution)
        return results

    async def run_async(
        self, requests: Sequence[InferenceRequest], emit: Emit
    ) -> list[InferenceResponse | RelayError]:
        """Run requests of an asynchronous handler on ``loop``, each with its own context."""
        context = copy.copy(self._context)
        context.metrics = copy.copy(context.metrics)  # the same metrics, of other requests
        execution = self._execution(context, requests, emit)
        logs.REQUESTS.set(tuple(request.request_id for request in requests))  # of this task alone
        with self._trace(requests):
            results = await self._execute_async(execution)
        self._log_failures(execution)
        return results

    def _trace(self, requests: Sequence[InferenceRequest]) -> AbstractContextManager[None]:
        """Return the span of a batch; the steps of continuous batching have one span for each request."""
        if self._execution_class is DecodeStep or not tracing.has_traced(requests):
            return _NO_SPAN
        return tracing.batch(requests, self._spec.ref)

    def _execute(
        self, execution: BatchExecution, prepared: Sequence[Future[Any] | None] = ()
    ) -> list[InferenceResponse | RelayError]:
        assert self._handle is not None, "load() comes first"
        try:
            data = execution.open(prepared)
            return execution.close(self._handle(data, execution.context) if data else [])
        except BaseException as error:  # SystemExit too: an author's code does not end the thread
            return execution.fail(error)

    async def _execute_async(self, execution: BatchExecution) -> list[InferenceResponse | RelayError]:
        assert self._handle is not None, "load() comes first"
        try:
            data = execution.open()
            return execution.close(await self._handle(data, execution.context) if data else [])
        except BaseException as error:
            return execution.fail(error)

    def _execution(
        self, context: Context, requests: Sequence[InferenceRequest], emit: Emit
    ) -> BatchExecution:
        return self._execution_class(
            context,
            requests,
            emit,
            self._spec.version,
            self._tensor_codec,
            self._max_response_size,
            self._settings.non_finite_numbers == "error",
        )

    def _make_codec(self, handler: Any) -> TensorRowCodec:
        """Return the codec for this handler's rows.

        The handler's own signature applies where the archive declares none.
        """
        input_type = get_extension(handler, "input_type")
        self.input_type = input_type if isinstance(input_type, str) else ""
        self.schemas = _limit_schemas(get_extension(handler, "schemas"))
        if self.signature is None:
            try:
                offered = get_extension(handler, "signature")
                self.signature = signature.read(offered) if isinstance(offered, Mapping) else None
            except BadRequest as error:
                raise self._start_failed(f"what the handler offers as its signature: {error}") from None
        decoded = self._settings.decode_input_request
        if self._envelope == "kservev2":
            return TensorRowCodec("document", decoded, self.signature)
        arrays = self._spec.tensors or (
            not self._envelope and get_extension(handler, "takes_tensors") is True
        )
        return TensorRowCodec("arrays" if arrays else "values", decoded, self.signature, self._spec.tensors)

    async def check_health(self) -> None:
        """Raise the error of an asynchronous ``check_health``; called on any event loop but the handler's."""
        if self._check is not None and self.loop is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._check(), self.loop))

    def _log_failures(self, execution: BatchExecution) -> None:
        """Log failures in full, but repeated ones briefly: a batch retried in halves fails the same way."""
        for handler_error in execution.failures:
            known, when = self._logged
            now = time.monotonic()
            if handler_error == known and now - when < _LOG_REPEAT_S:
                log.error("%s: the same failure again (requests %s)", self._spec.ref.app, execution.ids)
                continue
            self._logged = (handler_error, now)
            log.error(
                "%s: the handler failed (requests %s)\n%s", self._spec.ref.app, execution.ids, handler_error
            )

    def _profile(self) -> None:
        """Let ``profile:`` in model-config.yaml record the first batches; afterwards nothing of it stays."""
        try:
            count = profiling.parse_batch_count(self._spec.config.get("profile"))
        except ValueError as error:
            raise self._start_failed(f"model-config.yaml: {error}") from None
        if not count or self._profiles is None:
            return
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            log.warning(
                "%s: ENABLE_TORCH_PROFILER traces each batch, so profile is not heeded", self._spec.ref.app
            )
            return
        assert self._handle is not None, "load() comes first"
        handle = self._handle

        def done() -> None:
            self._handle = handle

        self._handle = profiling.BatchProfiler(handle, count, self._profiles, self._spec.ref.app, done)

    # Samples

    def _warm_up_sizes(self, most: int) -> list[int]:
        """Return the batch sizes of the warm-up: torch.compile compiles some sizes separately."""
        optimize = self._spec.config.get("optimize")
        if not isinstance(optimize, Mapping) or not optimize.get("compile"):
            return [most] if most > 1 else []
        from handlers.optimize.apply import warmup_batch_sizes  # late: it imports torch

        return warmup_batch_sizes(most)[1:]

    def _sample_files(self) -> list[str]:
        named = self._spec.config.get("samples")
        if named is None:
            folder = self._directory / "samples"
            if not folder.is_dir():
                return []
            return sorted(
                f"samples/{file.name}" for file in folder.iterdir() if file.is_file() and file.name[0] != "."
            )
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise self._start_failed(f"model-config.yaml: samples is a list of file names, not {named!r}")
        return named

    def _sample(self, name: str) -> InferenceRequest:
        root = self._directory.resolve()
        file = (root / name).resolve()
        if not file.is_relative_to(root):
            raise self._start_failed(
                f"sample {name}: the file lies outside the archive; pack it with --extra-files"
            )
        try:
            body = file.read_bytes()
        except OSError as error:
            cure = "pack it with --extra-files, or take it off samples: in model-config.yaml"
            raise self._start_failed(f"sample {name}: {error.strerror}; {cure}") from None
        media_type = mimetypes.guess_type(file.name)[0]
        inputs = (InputPart("body", body, media_type),)
        return InferenceRequest(self._spec.name, self._spec.version, inputs, request_id=f"sample {name}")

    def _run_once(self, requests: list[InferenceRequest]) -> list[InferenceResponse | RelayError]:
        """Return responses of one batch, without streams and log entries."""
        execution = self._execution(self._context, requests, lambda index, chunk: None)
        if self.loop is None:
            return self._execute(execution)
        return self.loop.run_until_complete(self._execute_async(execution))

    def _run_samples(self, what: str, requests: list[InferenceRequest]) -> None:
        names = [f"warm-up-{number}" for number in range(len(requests))]  # of sequences and requests
        if self._spec.continuous_batching or self._spec.sequence_batching:
            key, start = self._context.header_key_sequence_id, self._context.header_key_sequence_start
            headers = [{key: name, start: "true"} if self._spec.sequence_batching else {} for name in names]
            requests = [
                replace(c, request_id=n, headers=h) for c, n, h in zip(requests, names, headers, strict=True)
            ]
        going = requests
        while going:
            results = self._run_once(going)
            for result in results:
                if isinstance(result, RelayError):
                    detail = getattr(result, "detail", "")
                    raise self._start_failed(
                        f"{what}: {result}\n{detail}", isinstance(result, HandlerOutOfMemory)
                    )
            stays = [isinstance(result, ResponseChunk) and not result.last for result in results]
            going = [replace(c, inputs=()) for c, more in zip(going, stays, strict=True) if more]
        if self._spec.sequence_batching and self.handles_sequence_end:
            for name in names:
                self.sequence_ended(name, "ended")

    def _start_failed(self, why: str, is_out_of_memory: bool = False) -> StartFailed:
        failed = StartOutOfMemory if is_out_of_memory else StartFailed
        return failed(self._spec.name, self._spec.version, why)


async def _initialize(entry: handlers.LoadedHandler, context: Context) -> None:
    """Initialize the handler while its loop runs: an engine may start its own tasks already."""
    future = entry.initialize(context)
    if inspect.isawaitable(future):
        await future


def _limit_schemas(schemas: Any) -> Mapping[str, Any] | None:
    """Return a handler's schemas, unless they are no JSON, or too large for the routing table."""
    try:
        is_small = isinstance(schemas, Mapping) and len(orjson.dumps(schemas)) <= _MAX_SCHEMA_BYTES
    except TypeError:
        return None
    return schemas if is_small else None
