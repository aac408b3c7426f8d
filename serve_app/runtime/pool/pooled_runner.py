"""Runner of a version that shares its process with other versions of a pool.

Modules, working directory and the environment of the load are the version's own. Standard output, threads of
torch, and changes of the environment by requests belong to the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import handlers
from handlers.loading.private_modules import PrivateModules
from handlers.torchserve_compat import names as torchserve_names
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.errors import RelayError
from serve_app.runtime.batching.request_queue import Emit
from serve_app.runtime.host import thread_limits
from serve_app.runtime.pool import memory
from serve_app.runtime.runner import SWITCH_INTERVAL_S, Runner
from serve_app.telemetry.running_batches import BatchSlot

log = logging.getLogger(__name__)

_CLONE_FS = 0x200  # of linux/sched.h


class PooledRunner(Runner):
    """A runner whose handler has modules of its own; ``slot`` shows the batches that run, for crash reports.

    Only one version of a process may be in ``load`` at a time.
    """

    def __init__(self, slot: BatchSlot, spec: ModelSpec, directory: Path, *options: Any) -> None:
        super().__init__(spec, directory, *options)
        self.busy_seconds = 0.0  # in the handler
        self._modules = PrivateModules(directory)
        self._slot = slot

    def load(self, entry: handlers.LoadedHandler | None = None) -> None:
        thread_limits.apply_environment()  # of this thread: OpenMP's number is a thread's
        thread_limits.limit_tokenizers()
        with self._slot.running(), self._modules.loading(), _restored_environment(self._spec.ref.app):
            super().load(entry)

    def warm_up(self) -> None:
        with self._slot.running():
            super().warm_up()

    def run(
        self, requests: Sequence[InferenceRequest], emit: Emit, prepared: Sequence[Future[Any] | None] = ()
    ) -> list[InferenceResponse | RelayError]:
        self._slot.enter(threading.get_ident())
        started_at = time.perf_counter()
        try:
            return super().run(requests, emit, prepared)
        finally:
            self.busy_seconds += time.perf_counter() - started_at
            self._slot.leave()

    async def run_async(
        self, requests: Sequence[InferenceRequest], emit: Emit
    ) -> list[InferenceResponse | RelayError]:
        started_at = time.perf_counter()
        with self._slot.running():
            results = await super().run_async(requests, emit)
        self.busy_seconds += time.perf_counter() - started_at
        return results

    def close(self) -> None:
        """Free the model and the modules; the handler thread has no further task."""
        self._handle = None
        self._context = None  # type: ignore[assignment]
        self._prepare_row = self._measure_length = self._sequence_ended = None
        if self._prepare_pool is not None:
            self._prepare_pool.shutdown(wait=False)
        if self.loop is not None and not self.loop.is_running():
            self.loop.close()
        self._modules.close()
        memory.release_device_memory()

    def _prepare_process(self, available: int, runs_code: bool) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        torchserve_names.install()
        if runs_code:
            self._modules.enter()
            enter_directory(self._directory)

    def _tune_process(self) -> None:
        """Leave garbage collection and the heap as they are: evicted versions must be freed."""


@contextlib.contextmanager
def _restored_environment(app: str) -> Iterator[None]:
    """Undo changes of the environment: other versions of the process would see them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        changed = sorted(
            name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)
        )
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        if changed:
            log.info("%s set %s while it loaded; a pool undoes that afterwards", app, ", ".join(changed))


def enter_directory(directory: Path) -> bool:
    """Give the calling thread, and the threads that it starts, a working directory of their own.

    Handlers open relative paths there. Return whether the thread has it: unshare(2) needs no privilege, but
    Docker's default seccomp profile refuses it.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None or unshare(_CLONE_FS) != 0:
        log.warning(
            "The system refuses threads a working directory (unshare: %s), so handlers of this pool cannot "
            "open relative paths; they find their files in context.system_properties['model_dir'].",
            os.strerror(ctypes.get_errno()),
        )
        return False
    os.chdir(directory)
    return True
