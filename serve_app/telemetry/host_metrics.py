"""CPU, memory, disk and GPUs of this node, measured by one of its processes."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

from handlers.metrics import system
from serve_app.settings import Settings
from serve_app.telemetry.torchserve.meters import TorchServeMeters

log = logging.getLogger("torchrelay.metrics")

_FIRST = 1.0  # seconds over which the first CPU utilization is measured


class Machine:
    """A thread that measures every ``period`` seconds, in the process that holds the lock on ``lock``.

    Every process of a node has one; when the one that measures ends, another takes over.
    """

    def __init__(self, meters: TorchServeMeters, period: float, lock: Path) -> None:
        self._meters = meters
        self._period = period
        self._path = lock
        self._descriptor: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Measure no more, and let another process do it."""
        self._end.set()
        self._thread.join()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _run(self) -> None:
        wait = 0.0
        while not self._end.wait(wait):
            wait = self._period
            try:
                if self._descriptor is None:
                    if self._mine():
                        system.cpu_utilization()  # its next value is of the time from here
                        wait = min(self._period, _FIRST)
                    continue
                for metric in system.collect():
                    self._meters.child(metric.name, *metric.dimension_values).record(float(metric.value))
            except Exception:
                log.exception("this node could not be measured; it is tried again in %s s", self._period)

    def _mine(self) -> bool:
        """Whether this process is the node's: the kernel gives the lock to one, until it ends."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True


def collect(meters: TorchServeMeters, settings: Settings) -> Machine | None:
    """Measure this node from here on, where the settings ask for it and no other process of it does."""
    said = settings.telemetry
    if not said.system_metrics:
        return None
    # By the host's name, because a state_dir may be on a disk that nodes share.
    return Machine(meters, said.system_metrics_period, settings.state_dir / f"{meters.hostname}.system_metrics")
