"""Why a replica died, as far as anybody can know it.

A process that is killed says nothing. So each replica keeps a small file while it lives, in a folder of its node:
who it is, where its standard error goes, and what was the matter when it ended itself. The system lets go of the
file's lock when the process ends, however that comes about: whoever gets the lock has found a dead one, and the
file with what stands in its standard error (a crash's dump among it) tells why.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

import handlers

_TAIL = 64 << 10  # bytes of a standard error that are looked at
_LINES = 10  # of it that are told
_FRAMES = 12  # of a crash's stack
_FATAL = re.compile(r"^(?:Fatal Python error|Windows fatal exception): (.+)$", re.MULTILINE)
# In a worker's standard error: Ray's marks, the addresses that its crash handler names, and our own records.
_NOT_THE_AUTHORS = re.compile(
    r"^(:job_id:|:actor_name:|:task_name:|\[.*logging\.cc:|\d{4}-\d\d-\d\d \S+ \[\w+ *\] torchrelay\.)"
)
_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, handlers.__file__, threading.__file__)


@dataclass(frozen=True)
class Death:
    """A replica's end. ``why`` is for an operator: a sentence, and below it what there is to see."""

    app: str
    digest: str  # of the archive that it ran
    replica: str
    loading: bool  # it had not answered yet
    when: float  # seconds since the epoch, as near as can be known
    why: str
    out_of_memory: bool = False


class LastWords:
    """A live replica's file. A replica that ends in good order closes it, and leaves nothing."""

    def __init__(self, folder: Path, app: str, digest: str, replica: str) -> None:
        self._path = folder / f"{replica}.words"
        self._pid = os.getpid()
        self._said = False
        self._file: int | None = None
        with contextlib.suppress(OSError):  # a full disk costs the reason, not the replica
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        error, offset = _standard_error()
        self._note(app=app, digest=digest, replica=replica, stderr=error, offset=offset, kills=_kills())
        self._exit = os._exit
        os._exit = self._tell_and_exit  # type: ignore[assignment]
        atexit.register(self.say, "its interpreter was told to end: by SIGTERM, or by the handler's code")

    def ready(self) -> None:
        """The model is loaded, and answers."""
        self._note(ready=True)

    def say(self, why: str, whole: bool = True) -> None:
        """This process is about to end, and knows why. The first word stands.

        ``whole``: there is nothing to add from its standard error.
        """
        if not self._said and os.getpid() == self._pid:
            self._said = True
            self._note(why=why, when=time.time(), whole=whole)

    def close(self) -> None:
        """The end is as it should be."""
        file, self._file = self._file, None
        atexit.unregister(self.say)
        os._exit = self._exit
        if file is not None:
            self._path.unlink(missing_ok=True)
            os.close(file)

    def _note(self, **said: Any) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.write(self._file, orjson.dumps(said) + b"\n")

    def _tell_and_exit(self, status: int) -> None:
        self.say(f"it called os._exit({status}) at\n{stack(sys._getframe(1))}", whole=False)
        self._exit(status)


def stack(frame: FrameType) -> str:
    """Where a thread of an author's code stands, from the author's first frame on."""
    frames = traceback.extract_stack(frame)
    while len(frames) > 1 and frames[0].filename.startswith(_OURS):
        del frames[0]
    return "".join(traceback.format_list(frames[-_FRAMES:]))


def dead(folder: Path, but: str = "") -> list[Death]:
    """The replicas that have died since anybody asked; ``but`` is the one that asks, if it is one."""
    found = []
    for path in folder.glob("*.words"):
        if path.stem != but:
            with _taken(path) as text:
                if text:
                    found.append(_death(text, path))
    return found


@contextlib.contextmanager
def _taken(path: Path) -> Iterator[bytes]:
    """What a dead replica left, once: then it is gone. Nothing where the replica lives or somebody else was quicker."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield b""
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink and os.fstat(file).st_size:
            path.unlink(missing_ok=True)
            yield os.read(file, 1 << 20)
        else:  # taken, or just made and not yet locked
            yield b""
    except OSError:
        yield b""
    finally:
        os.close(file)


def _death(text: bytes, path: Path) -> Death:
    said: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            said |= orjson.loads(line)
    loading = not said.get("ready")
    why, memory = said.get("why"), False
    tail = _tail(said.get("stderr"), said.get("offset", 0))
    shown = "" if said.get("whole") else tail
    if why is None:
        kills = _kills() - said.get("kills", 0)
        if fatal := list(_FATAL.finditer(tail)):
            crash = fatal[-1]
            why = f"native code of it crashed: {crash[1]}\n{_frames(tail[crash.end() :])}"
            shown = tail[: crash.start()]
        elif kills > 0:
            memory = True
            why = (
                "the system killed it: memory ran out (the kernel's count of such kills on this machine rose by "
                f"{kills} while it ran)"
            )
        else:
            why = (
                "it ended without a word: somebody or something killed it with SIGKILL (an operator, Ray's memory "
                "monitor, a container's limit, Ray Serve because it answered no health check), or native code of it "
                "called exit()"
            )
    lines = [line for line in shown.splitlines() if line.strip() and not _NOT_THE_AUTHORS.match(line)][-_LINES:]
    if lines:
        why = why.rstrip() + "\nThe last lines of its standard error:\n" + "\n".join(lines)
    doing = "while it loaded the model" if loading else "while it served"
    return Death(
        app=said.get("app", ""),
        digest=said.get("digest", ""),
        replica=said.get("replica", path.stem),
        loading=loading,
        when=said.get("when") or time.time(),
        why=f"The replica's process ended {doing}: {why.rstrip()}",
        out_of_memory=memory,
    )


def _frames(dump: str) -> str:
    """The author's frames of faulthandler's dump, which has the innermost first."""
    frames = [line for line in dump.splitlines() if line.startswith("  File ")][:_FRAMES]
    ours = [i for i, line in enumerate(frames) if line.removeprefix('  File "').startswith(_OURS)]
    return "\n".join(frames[: ours[0]] if ours and ours[0] else frames)


def _standard_error() -> tuple[str, int]:
    """The file that this process's standard error goes to, and its size now; "" where it is none."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return (path, os.fstat(2).st_size) if os.path.isfile(path) else ("", 0)
    except OSError:
        return "", 0


def _tail(path: str | None, offset: int) -> str:
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - _TAIL))
            return file.read(_TAIL).decode(errors="replace")
    except OSError:
        return ""


def _kills() -> int:
    """How many processes of this machine the kernel has killed for memory since it started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
