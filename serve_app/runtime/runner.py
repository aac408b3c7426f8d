"""One model in this process: loaded, warmed, and asked for batches.

Every method belongs in the author's thread: they block, and they run what the author wrote.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import logging
import mimetypes
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import handlers
from handlers import profiling, torchserve_names
from handlers.context import Context
from handlers.metrics import MetricCache, outlet
from serve_app import signature
from serve_app.errors import BadRequest, OutOfResources, RelayError, StartFailed, StartOutOfMemory
from serve_app.runtime import cores, heap, rows, threads
from serve_app.runtime.row_form import RowForm
from serve_app.runtime.step import Step
from serve_app.runtime.turn import Emit, Turn, out_of_memory, trace
from serve_app.settings import RuntimeSettings
from serve_app.signature import Signature
from serve_app.telemetry import logs
from serve_app.types import Call, Chunk, Input, ModelSpec, Reply

log = logging.getLogger("torchrelay.runner")

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
            model_yaml_config=dict(spec.config),
            metrics=metrics,
        )
        self._context.header_key_sequence_id = settings.header_key_sequence_id
        self._context.header_key_sequence_start = settings.header_key_sequence_start
        self._context.header_key_sequence_end = settings.header_key_sequence_end
        self._gpu = gpu_id
        self._profiles = profiles
        self._hidden = settings.blacklist_env_vars
        self._largest = settings.max_response_size
        self._pin = settings.pin
        self._envelope = spec.config.get("envelope") or ("" if spec.tensors else settings.service_envelope)
        self._settings = settings
        self._form = RowForm(decoded=settings.decode_input_request)
        self.signature: Signature | None = spec.signature  # what the model takes, as far as file or handler say it
        self._handle: Callable[[list[dict[str, Any]], Context], Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # of an asynchronous handler; set by ``load``
        self._check: Callable[[], Awaitable[None]] | None = None  # an asynchronous handler's own check_health
        self._prepare_row: Callable[[Any], Any] | None = None
        self._length: Callable[[Any], int] | None = None
        self._preparing: ThreadPoolExecutor | None = None
        self._logged: tuple[str, float] = ("", 0.0)
        self._turns = Step if spec.continuous_batching else Turn
        self._sequence_ended: Callable[[str, str], Any] | None = None

    def load(self) -> None:
        """Import the handler and let it load its model. Raises StartFailed or StartOutOfMemory.

        From here on this process is the model's: the names that archives import are TorchServe's too,
        the working directory is the archive's, and threads change over more often.
        """
        sys.setswitchinterval(_TURN)
        available = _cores()  # before the model's threads are pinned to some of them
        try:
            torchserve_names.install()
            os.chdir(self._directory)
            hide(self._hidden)
            pinned = self._spec.config.get("pin", self._pin and self._gpu is None)
            if (number := threads.intra_op(self._spec, available, pinned)) is not None:
                threads.limit(number)
                if pinned:
                    cores.pin(number, self._spec.ref.app)
            threads.limit_tokenizers()
            if self._gpu is not None and 0 < self._spec.num_gpus < 1:
                from handlers import device  # torch, which most processes of CPU models never import

                device.share(self._gpu, self._spec.num_gpus)
            entry = handlers.load(self._spec.handler, self._directory, self._manifest)
            if entry.asynchronous:
                self.loop = asyncio.new_event_loop()
                self.loop.run_until_complete(_initialize(entry, self._context))
                check = getattr(entry.instance, "check_health", None)
                self._check = check if inspect.iscoroutinefunction(check) else None
            else:
                entry.initialize(self._context)
            self._handle = handlers.load_envelope(self._envelope)(entry).handle if self._envelope else entry
        except BaseException as error:
            raise self._start_failed(trace(error), out_of_memory(error)) from None
        self._form = self._form_of(entry.instance)
        if not self._envelope:  # a handler behind one never sees the row as it came
            self._prepare_row = getattr(entry.instance, "prepare_row", None)
            length = getattr(entry.instance, "length", None) if self._spec.bucket_by_length else None
            self._length = length if callable(length) else None
            if callable(leave := getattr(entry.instance, "leave_arrays", None)):
                leave()
        ended = getattr(entry.instance, "sequence_ended", None)
        self._sequence_ended = ended if callable(ended) else None
        if self.loop is not None:
            self._turns = Turn  # an asynchronous handler streams by itself
        if (self._prepare_row is not None or self._length is not None) and self.loop is None:
            self._preparing = ThreadPoolExecutor(available, thread_name_prefix="prepare")

    @property
    def prepare(self) -> Callable[[Call], Future[Any]] | None:
        """Begins a call's row ahead of its batch, from any thread; ``run`` takes the future. None: nothing to begin."""
        return self._begin if self._preparing is not None else None

    @property
    def hears_of_ends(self) -> bool:
        """Whether the handler has a method ``sequence_ended(sequence_id, why)``."""
        return self._sequence_ended is not None

    def sequence_ended(self, name: str, why: str) -> None:
        """Tell the handler that nothing more comes of a sequence; what it raises is logged."""
        assert self._sequence_ended is not None
        try:
            self._sequence_ended(name, why)
        except Exception as error:
            log.error("%s: sequence_ended(%r, %r) failed\n%s", self._spec.ref.app, name, why, trace(error))

    def _begin(self, call: Call) -> Future[Any]:
        assert self._preparing is not None
        return self._preparing.submit(rows.prepared, call, self._form.read, self._prepare_row, self._length)

    def warm_up(self) -> None:
        """Answer the archive's sample requests, each alone and then a full batch of them. Raises StartFailed.

        ``samples:`` in model-config.yaml names their files; without it they are what lies in the
        archive's ``samples/``. A compiled model runs smaller batches too. Ends with everything that loading
        made set aside from garbage collection, which otherwise walks through it again and again, tens of
        milliseconds a time; with the heap kept for the batches; and with ``profile:`` ready to record.
        """
        samples = [(file, self._sample(file)) for file in self._sample_files()]
        with outlet.muted():
            for file, call in samples:
                self._try(f"sample {file}", [call])
            size = self._spec.batch_size
            for count in self._batches(size) if samples else ():
                self._try(f"a batch of {count} samples", [samples[i % len(samples)][1] for i in range(count)])
        self._profile()
        gc.collect()
        gc.freeze()
        heap.keep()

    def run(
        self,
        calls: Sequence[Call],
        emit: Emit,
        ahead: Sequence[Future[Any] | None] = (),
    ) -> list[Reply | RelayError]:
        """One reply or one error for each call, all of one kind; raises nothing.

        ``ahead`` has what ``prepare`` gave for each call, or None; empty where nothing was begun.

        An error that stands for the whole batch is one object in every place. ``emit(index, piece)``
        takes the intermediate pieces of a row: first a Reply that has the row's status and headers,
        then bytes; it may be called from any thread that the author started.
        """
        turn = self._turn(self._context, calls, emit)
        assert self._handle is not None, "load() comes first"
        spoken_for = logs.REQUESTS.set(tuple(call.request_id for call in calls))
        try:
            data = turn.open(ahead)
            results = turn.close(self._handle(data, turn.context) if data else [])
        except BaseException as error:  # SystemExit too: an author's code does not end the thread
            results = turn.fail(error)
        finally:
            logs.REQUESTS.reset(spoken_for)
        self._report(turn)
        return results

    async def run_async(self, calls: Sequence[Call], emit: Emit) -> list[Reply | RelayError]:
        """``run`` for an asynchronous handler, on ``loop``: several at once, each with a context of its own."""
        context = copy.copy(self._context)
        context.metrics = copy.copy(context.metrics)  # the same metrics, of other requests
        turn = self._turn(context, calls, emit)
        assert self._handle is not None, "load() comes first"
        logs.REQUESTS.set(tuple(call.request_id for call in calls))  # of this task alone
        try:
            data = turn.open()
            results = turn.close(await self._handle(data, turn.context) if data else [])
        except BaseException as error:
            results = turn.fail(error)
        self._report(turn)
        return results

    def _turn(self, context: Context, calls: Sequence[Call], emit: Emit) -> Turn:
        return self._turns(context, calls, emit, self._spec.version, self._form, self._largest)

    def _form_of(self, handler: Any) -> RowForm:
        """How this handler takes its rows. What it says of its signature holds where the file says nothing."""
        if self.signature is None:
            try:
                offered = getattr(handler, "signature", None)
                self.signature = signature.read(offered) if isinstance(offered, Mapping) else None
            except BadRequest as error:
                raise self._start_failed(f"what the handler offers as its signature: {error}") from None
        decoded = self._settings.decode_input_request
        if self._envelope == "kservev2":
            return RowForm("document", decoded, self.signature)
        arrays = self._spec.tensors or (not self._envelope and getattr(handler, "takes_tensors", None) is True)
        return RowForm("arrays" if arrays else "values", decoded, self.signature, self._spec.tensors)

    async def check_health(self) -> None:
        """Raise what an asynchronous handler's own ``check_health`` raises; from any event loop but the handler's."""
        if self._check is not None and self.loop is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._check(), self.loop))

    def _report(self, turn: Turn) -> None:
        """Log what failed in full, unless it was said just now: a batch run again in halves fails the same way."""
        for failure in turn.failures:
            known, when = self._logged
            now = time.monotonic()
            if failure == known and now - when < _SAY_AGAIN:
                log.error("%s: the same failure again (requests %s)", self._spec.ref.app, turn.ids)
                continue
            self._logged = (failure, now)
            log.error("%s: the handler failed (requests %s)\n%s", self._spec.ref.app, turn.ids, failure)

    def _profile(self) -> None:
        """Let ``profile:`` in model-config.yaml record the first batches; nothing of it stays afterwards."""
        try:
            count = profiling.batches(self._spec.config.get("profile"))
        except ValueError as error:
            raise self._start_failed(f"model-config.yaml: {error}") from None
        if not count or self._profiles is None:
            return
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            log.warning("%s: ENABLE_TORCH_PROFILER traces each batch, so profile is not heeded", self._spec.ref.app)
            return
        assert self._handle is not None, "load() comes first"
        handle = self._handle

        def done() -> None:
            self._handle = handle

        self._handle = profiling.Profile(handle, count, self._profiles, self._spec.ref.app, done)

    # Samples

    def _batches(self, most: int) -> list[int]:
        """The sizes of batches to warm up with: torch.compile compiles some of them by themselves."""
        optimize = self._spec.config.get("optimize")
        if not isinstance(optimize, Mapping) or not optimize.get("compile"):
            return [most] if most > 1 else []
        from handlers.optimisation import buckets  # late: it imports torch

        return buckets(most)[1:]

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

    def _once(self, calls: list[Call]) -> list[Reply | RelayError]:
        """Answers that nobody streams, with no word in the log."""
        turn = self._turn(self._context, calls, lambda index, piece: None)
        assert self._handle is not None, "load() comes first"
        try:
            if not (data := turn.open()):
                return turn.close([])
            values = self._handle(data, turn.context)
            return turn.close(self.loop.run_until_complete(values) if self.loop is not None else values)
        except BaseException as error:
            return turn.fail(error)

    def _try(self, what: str, calls: list[Call]) -> None:
        names = [f"warm-up-{number}" for number in range(len(calls))]  # of sequences, and of requests that go on
        if self._spec.continuous_batching or self._spec.sequence_batching:
            key, start = self._context.header_key_sequence_id, self._context.header_key_sequence_start
            headers = [{key: name, start: "true"} if self._spec.sequence_batching else {} for name in names]
            calls = [replace(c, request_id=n, headers=h) for c, n, h in zip(calls, names, headers, strict=True)]
        going = calls
        while going:
            results = self._once(going)
            for result in results:
                if isinstance(result, RelayError):
                    detail = getattr(result, "detail", "")
                    raise self._start_failed(f"{what}: {result}\n{detail}", isinstance(result, OutOfResources))
            stays = [isinstance(result, Chunk) and not result.last for result in results]
            going = [replace(c, inputs=()) for c, more in zip(going, stays, strict=True) if more]
        if self._spec.sequence_batching and self.hears_of_ends:
            for name in names:
                self.sequence_ended(name, "ended")

    def _start_failed(self, why: str, out_of_memory: bool = False) -> StartFailed:
        failed = StartOutOfMemory if out_of_memory else StartFailed
        return failed(self._spec.name, self._spec.version, why)


async def _initialize(entry: handlers.Entry, context: Context) -> None:
    """With a loop that runs: an engine may begin its own tasks already."""
    begun = entry.initialize(context)
    if inspect.isawaitable(begun):
        await begun


def hide(pattern: str) -> None:
    """Take the environment variables whose whole name ``pattern`` matches out of this process."""
    if pattern:
        for name in [name for name in os.environ if re.fullmatch(pattern, name)]:
            del os.environ[name]


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
