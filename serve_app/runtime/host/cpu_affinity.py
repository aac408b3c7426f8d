"""CPU affinity: cores of this node for one replica's model, apart from those of other replicas.

Locks on files that all replicas of a node see hold the claims. The system releases a lock when its process
ends in any way, so a replica that is killed keeps no core.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_CLAIMS = 256  # claims that one core may have
_RETRY_PERIOD_S = 5.0  # seconds between looks for a core that became free


def lock_directory() -> Path:
    """Return the directory of this node's locks: in the temporary folder, one for each user."""
    return Path(tempfile.gettempdir()) / f"torchrelay-cores-{os.getuid()}"


class CpuClaim:
    """A claim of cores for the calling thread, and for all threads and processes that it starts from now on.

    The claimed cores are the least claimed ones that the thread may use. Where replicas want more cores than
    there are, they share them evenly. A replica that shares a core moves to one of its own as soon as there
    is one. Raises OSError where the locks fail.
    """

    def __init__(self, count: int, locks: Path, period: float = _RETRY_PERIOD_S) -> None:
        self._locks = locks
        self._period = period
        self._allowed = sorted(os.sched_getaffinity(0))
        self._held: dict[int, tuple[int, int]] = {}  # core -> its place there, 0 is the first, and the lock
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in range(_MAX_CLAIMS):
            for core in self._allowed:
                if len(self._held) < min(count, len(self._allowed)) and core not in self._held:
                    self._try_lock(core, place)
        os.sched_setaffinity(0, self.cores)
        if self._is_shared:
            threading.Thread(target=self._seek_free_cores, name="cpu-affinity", daemon=True).start()

    @property
    def cores(self) -> Collection[int]:
        return sorted(self._held)

    @property
    def _is_shared(self) -> bool:
        return any(place for place, _ in self._held.values())

    def _try_lock(self, core: int, place: int) -> bool:
        lock = os.open(self._locks / f"{core}.{place}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[core] = place, lock
        return True

    def _seek_free_cores(self) -> None:
        while self._is_shared:
            time.sleep(self._period)
            with contextlib.suppress(OSError):  # the folder was swept: there is a next time
                self._move_to_free_core()

    def _move_to_free_core(self) -> None:
        """Take a lower place, at the shared core or at another one, and move there."""
        core = max(self._held, key=self._held.__getitem__)
        before, (place, lock) = set(self._held), self._held.pop(core)
        for lower_place in range(place):
            if any(
                self._try_lock(other, lower_place)
                for other in (core, *self._allowed)
                if other not in self._held
            ):
                os.close(lock)
                _move_threads(before, self._held)
                return
        self._held[core] = place, lock


def _move_threads(before: Collection[int], after: Collection[int]) -> None:
    """Move the threads that run on exactly the cores ``before`` to ``after``: the model's threads."""
    if set(before) == set(after):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == set(before):
                os.sched_setaffinity(thread, after)


def pin(count: int, what: str) -> CpuClaim | None:
    """Return a claim of ``count`` cores; None, with a warning, where the system supports none."""
    if not hasattr(os, "sched_setaffinity"):
        log.warning("%s has pin, and this system lets no program choose its cores; it runs unpinned", what)
        return None
    try:
        claim = CpuClaim(count, lock_directory())
    except OSError as error:
        log.warning("%s has pin, and %s; it runs unpinned", what, error)
        return None
    log.info("%s computes on the cores %s", what, ", ".join(map(str, claim.cores)))
    return claim
