"""Crash reports: the causes of replicas' deaths.

A killed process cannot report anything itself. Each replica therefore keeps a small file in a folder of its
node. The file has the replica's identity, the path of its standard error, and the reason when it ended
itself. The operating system releases the file's lock whenever the process ends, so a process that gets the
lock has found a dead replica. The cause follows from the file and the end of the standard error (with a
crash's dump).
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from handlers.loading import loader as handler_loader
from serve_app.telemetry.running_batches import read_running

_TAIL_SIZE = 64 << 10  # bytes of a standard error that are searched
_MAX_LINES = 10  # of it in a report
RUNNING_SUFFIX = ".running"  # of the file beside a report, see running_batches.py
_MAX_FRAMES = 12  # of a crash's stack
_FATAL = re.compile(r"^(?:Fatal Python error|Windows fatal exception): (.+)$", re.MULTILINE)
_CURRENT_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+) ", re.MULTILINE)
# Lines of a standard error that are not the handler's: Ray's markers, its crash handler, and server logs.
_SERVER_LINE = re.compile(
    r"^(:job_id:|:actor_name:|:task_name:|\[.*logging\.cc:"
    r"|\d{4}-\d\d-\d\d \S+ \[\w+ *\] (?:serve_app|handlers)\.)"
)
_SERVER_FILES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    handler_loader.__file__,
    threading.__file__,
)


@dataclass(frozen=True)
class CrashReport:
    """The death of a replica; ``cause`` is a sentence for an operator, followed by stack and output."""

    app: str
    digest: str  # of the archive that it ran
    replica: str
    loading: bool  # it had not been ready yet
    when: float  # seconds since the epoch, approximately
    cause: str
    started: float = 0.0  # of the process, in seconds since the epoch
    out_of_memory: bool = False
    # In a process of a pool: the versions that ran a batch or loaded, and the one whose thread crashed it.
    running: tuple[str, ...] = ()
    culprit: str = ""


class CrashReporter:
    """The file of a live replica; a replica that ends normally closes and removes it."""

    def __init__(self, folder: Path, app: str, digest: str, replica: str) -> None:
        self._path = folder / f"{replica}.words"
        self._pid = os.getpid()
        self._reported = False
        self._file: int | None = None
        with contextlib.suppress(OSError):  # a full disk must not stop the replica
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640
            )
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        error, offset = _standard_error()
        self._write(
            app=app,
            digest=digest,
            replica=replica,
            started=time.time(),
            stderr=error,
            offset=offset,
            kills=_oom_kills(),
        )
        self._exit = os._exit
        os._exit = self._report_and_exit  # type: ignore[assignment]
        atexit.register(self.report, "its interpreter has exited: by SIGTERM, or by the handler's code")

    def set_ready(self) -> None:
        """Record that the model is loaded and ready."""
        self._write(ready=True)

    def report(self, cause: str, complete: bool = True, thread: int = 0) -> None:
        """Record the cause before this process ends itself; later calls have no effect.

        With ``complete`` the report needs no lines of the standard error. ``thread`` has caused the end.
        """
        if not self._reported and os.getpid() == self._pid:
            self._reported = True
            self._write(why=cause, when=time.time(), whole=complete, thread=thread)

    def close(self) -> None:
        """Remove the file: the replica ends normally."""
        file, self._file = self._file, None
        atexit.unregister(self.report)
        os._exit = self._exit
        if file is not None:
            self._path.unlink(missing_ok=True)
            os.close(file)

    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.write(self._file, orjson.dumps(fields) + b"\n")

    def _report_and_exit(self, status: int) -> None:
        cause = f"it called os._exit({status}) at\n{format_stack(sys._getframe(1))}"
        self.report(cause, complete=False, thread=threading.get_ident())
        self._exit(status)


def format_stack(frame: FrameType) -> str:
    """Return the stack of a thread from the first frame of the handler's code on."""
    frames = traceback.extract_stack(frame)
    while len(frames) > 1 and frames[0].filename.startswith(_SERVER_FILES):
        del frames[0]
    return "".join(traceback.format_list(frames[-_MAX_FRAMES:]))


def collect_reports(folder: Path, exclude: str = "") -> list[CrashReport]:
    """Return and remove the reports of dead replicas; ``exclude`` is the calling replica, if it is one."""
    paths = [path for path in folder.glob("*.words") if path.stem != exclude]
    return [_build_report(text, path) for path in paths if (text := _take_file(path))]


def _take_file(path: Path) -> bytes:
    """Remove a dead replica's file and return its content; empty if the replica lives or the file is gone."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have taken the file; an empty file was just created and is not yet locked.
        if os.fstat(file.fileno()).st_nlink and (text := file.read()):
            path.unlink(missing_ok=True)
            return text
    return b""


def _build_report(text: bytes, path: Path) -> CrashReport:
    fields: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            fields |= orjson.loads(line)
    loading = not fields.get("ready")
    cause, out_of_memory, thread = fields.get("why"), False, fields.get("thread", 0)
    tail = _read_tail(fields.get("stderr"), fields.get("offset", 0))
    output = "" if fields.get("whole") else tail
    if cause is None:
        kills = _oom_kills() - fields.get("kills", 0)
        if fatal := list(_FATAL.finditer(tail)):
            crash = fatal[-1]
            dump = tail[crash.end() :]
            if current := _CURRENT_THREAD.search(dump):  # faulthandler dumps all threads in a pool's process
                thread = int(current[1], 16)
                dump = dump[current.end() :].partition("\n\n")[0]
            cause = f"its native code crashed: {crash[1]}\n{_frames(dump)}"
            output = tail[: crash.start()]
        elif kills > 0:
            out_of_memory = True
            cause = (
                "the system killed it: memory ran out (the kernel's count of such kills on this machine rose "
                f"by {kills} while it ran)"
            )
        else:
            cause = (
                "it ended without a report: it was killed with SIGKILL (by an operator, Ray's memory "
                "monitor, a container's limit, Ray Serve because it failed health checks), or its native "
                "code called exit()"
            )
    lines = [line for line in output.splitlines() if line.strip() and not _SERVER_LINE.match(line)]
    if lines:
        last_lines = "\n".join(lines[-_MAX_LINES:])
        cause = f"{cause.rstrip()}\nThe last lines of its standard error:\n{last_lines}"
    running, culprit = _take_running(path.with_suffix(RUNNING_SUFFIX), thread)
    phase = "while it loaded the model" if loading else "while it served"
    return CrashReport(
        app=fields.get("app", ""),
        digest=fields.get("digest", ""),
        replica=fields.get("replica", path.stem),
        loading=loading,
        when=fields.get("when") or time.time(),
        cause=f"The replica's process ended {phase}: {cause.rstrip()}",
        started=fields.get("started", 0.0),
        out_of_memory=out_of_memory,
        running=running,
        culprit=culprit,
    )


def _take_running(path: Path, thread: int) -> tuple[tuple[str, ...], str]:
    """Return the versions that ran in a dead process, and that of the thread that ended it."""
    batches = read_running(path)
    path.unlink(missing_ok=True)
    culprit = next((batch.app for batch in batches if batch.thread == thread), "")
    return tuple(batch.app for batch in batches), culprit


def _frames(dump: str) -> str:
    """Return the handler's frames of faulthandler's dump, which has the innermost first."""
    frames = [line for line in dump.splitlines() if line.startswith("  File ")][:_MAX_FRAMES]
    server_frames = [
        i for i, line in enumerate(frames) if line.removeprefix('  File "').startswith(_SERVER_FILES)
    ]
    return "\n".join(frames[: server_frames[0]] if server_frames and server_frames[0] else frames)


def _standard_error() -> tuple[str, int]:
    """Return the file of this process's standard error and its size; "" where it is no file."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return (path, os.fstat(2).st_size) if os.path.isfile(path) else ("", 0)
    except OSError:
        return "", 0


def _read_tail(path: str | None, offset: int) -> str:
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - _TAIL_SIZE))
            return file.read(_TAIL_SIZE).decode(errors="replace")
    except OSError:
        return ""


def _oom_kills() -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
