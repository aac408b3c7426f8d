"""CPU, memory, disk and GPUs of this node, measured by one of its processes."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

from handlers.metrics import system
from serve_app.settings import Settings
from serve_app.telemetry.torchserve.recorders import TorchServeRecorders

log = logging.getLogger(__name__)

_FIRST_PERIOD = 1.0  # seconds over which the first CPU utilization is measured


class HostMetrics:
    """A thread that measures every ``period`` seconds, in the process that holds the lock on ``lock``.

    Every process of a node has one; when the measuring process ends, another takes over.
    """

    def __init__(self, recorders: TorchServeRecorders, period: float, lock: Path) -> None:
        self._recorders = recorders
        self._period = period
        self._lock_path = lock
        self._descriptor: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop measuring, and release the lock to another process."""
        self._stopped.set()
        self._thread.join()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _run(self) -> None:
        wait = 0.0
        while not self._stopped.wait(wait):
            wait = self._period
            try:
                if self._descriptor is None:
                    if self._acquire_lock():
                        system.cpu_utilization()  # the next value covers the time from here
                        wait = min(self._period, _FIRST_PERIOD)
                    continue
                for metric in system.collect_metrics():
                    self._recorders.child(metric.name, *metric.dimension_values).record(float(metric.value))
            except Exception:
                log.exception("host metrics could not be collected; next attempt in %s s", self._period)

    def _acquire_lock(self) -> bool:
        """Return whether this process holds the node's lock; the kernel releases it when the process ends."""
        self._lock_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True


def start(recorders: TorchServeRecorders, settings: Settings) -> HostMetrics | None:
    """Start to measure this node; None where the settings switch it off."""
    telemetry = settings.telemetry
    if not telemetry.system_metrics:
        return None
    # The file has the host's name, because nodes may share the disk of a state_dir.
    return HostMetrics(
        recorders,
        telemetry.system_metrics_period,
        settings.state_dir / f"{recorders.hostname}.system_metrics",
    )
