"""Cores of this node for one replica's model, apart from those of other replicas.

Which cores are taken is known by locks on files that all replicas of a node see. The system lets go of a lock when its
process ends, however that comes about, so a replica that is killed takes no core with it.
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

log = logging.getLogger("torchrelay.model")

_PLACES = 256  # claims that one core may have
_PERIOD = 5.0  # seconds between looks for a core that became free


def folder() -> Path:
    """Where the locks of this node lie: in the temporary folder, for each user of the system apart."""
    return Path(tempfile.gettempdir()) / f"torchrelay-cores-{os.getuid()}"


class Claim:
    """So many cores for the calling thread and for every thread and process that it begins from now on, until this
    process ends.

    They are the least claimed of those that the thread may use. Where replicas want more than there are they share
    them evenly, and one that shares moves to a core of its own as soon as there is one. Raises OSError where the
    locks cannot be had.
    """

    def __init__(self, count: int, locks: Path, period: float = _PERIOD) -> None:
        self._locks = locks
        self._period = period
        self._allowed = sorted(os.sched_getaffinity(0))
        self._held: dict[int, tuple[int, int]] = {}  # core -> its place there, 0 is the first, and the lock
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in range(_PLACES):
            for core in self._allowed:
                if len(self._held) < min(count, len(self._allowed)) and core not in self._held:
                    self._take(core, place)
        os.sched_setaffinity(0, self.cores)
        if self._shares:
            threading.Thread(target=self._settle, name="cores", daemon=True).start()

    @property
    def cores(self) -> Collection[int]:
        return sorted(self._held)

    @property
    def _shares(self) -> bool:
        return any(place for place, _ in self._held.values())

    def _take(self, core: int, place: int) -> bool:
        lock = os.open(self._locks / f"{core}.{place}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[core] = place, lock
        return True

    def _settle(self) -> None:
        while self._shares:
            time.sleep(self._period)
            with contextlib.suppress(OSError):  # the folder was swept: there is a next time
                self._better()

    def _better(self) -> None:
        """Take an earlier place, at the core that is shared or at another one, and move there."""
        core = max(self._held, key=self._held.__getitem__)
        before, (place, lock) = set(self._held), self._held.pop(core)
        for earlier in range(place):
            if any(self._take(other, earlier) for other in (core, *self._allowed) if other not in self._held):
                os.close(lock)
                _move(before, self._held)
                return
        self._held[core] = place, lock


def _move(before: Collection[int], after: Collection[int]) -> None:
    """Threads that run on exactly the cores ``before`` go over to ``after``: the model's, and none beside it."""
    if set(before) == set(after):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == set(before):
                os.sched_setaffinity(thread, after)


def pin(count: int, what: str) -> Claim | None:
    """A claim of ``count`` cores; None, with a warning, where the system has no such thing."""
    if not hasattr(os, "sched_setaffinity"):
        log.warning("%s asks for pin, and this system lets no program choose its cores; it runs unpinned", what)
        return None
    try:
        claim = Claim(count, folder())
    except OSError as error:
        log.warning("%s asks for pin, and %s; it runs unpinned", what, error)
        return None
    log.info("%s computes on the cores %s", what, ", ".join(map(str, claim.cores)))
    return claim
