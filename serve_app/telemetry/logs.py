"""Logs that never hold up the event loop: what is said is kept in memory, a thread writes it.

A write to a full pipe or a slow disk can take longer than a request; and many lines formatted at
once keep the interpreter from everybody else. So a line is made where it belongs, for about a
microsecond, and written somewhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, Literal

import orjson

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings

log = logging.getLogger("torchrelay.logs")

PERIOD = 0.5  # seconds between two writes of the access log, at least
_FORMAT = "%(asctime)s [%(levelname)-5s] %(name)s - %(message)s"


class AccessLog:
    """One line a request, in TorchServe's form or as JSON, to a file or a stream; standard output by default.

    Any number of processes may append to one path; its folder is made where it is missing. A file of
    ``limit`` bytes is put aside as ``path.1``, and whoever moves it away finds a new one begun. What was
    written is out after ``PERIOD`` seconds, and when the log is closed or the interpreter ends.
    """

    def __init__(
        self,
        target: str | Path | IO[str] | None = None,
        form: Literal["text", "json"] = "text",
        limit: int = 0,
    ) -> None:
        self._sink = _File(Path(target), limit) if isinstance(target, (str, Path)) else _Stream(target or sys.stdout)
        self._json = form == "json"
        self._lines: list[str] = []
        self._some = threading.Event()
        self._closing = threading.Event()
        self._second, self._stamp = 0, ""
        self._complained = False
        self._thread = threading.Thread(target=self._drain, name="access-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(
        self,
        client: str,
        method: str,
        path: str,
        http_version: str,
        status: int,
        milliseconds: float,
        request_id: str = "",
        model: str = "",
        version: str = "",
    ) -> None:
        """One request was answered; ``client`` is its host:port, ``path`` has its query."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
        stamp = f"{self._stamp},{int((now - second) * 1000):03d}"
        if self._json:
            line = {"time": stamp, "client": client, "method": method, "path": path, "http_version": http_version}
            line |= {"status": status, "milliseconds": round(milliseconds, 3), "request_id": request_id}
            if model:
                line |= {"model": model, "version": version}
            text = orjson.dumps(line).decode()
        else:
            if not path.isprintable():  # a line break in a path would forge a line
                path = path.encode("unicode_escape").decode()
            text = f'{stamp} - /{client} "{method} {path} HTTP/{http_version}" {status} {int(milliseconds)}'
            if request_id:
                text += f" id={request_id}"
            if model:
                text += f" model={model} version={version}"
        lines = self._lines
        lines.append(text)
        if len(lines) == 1:
            self._some.set()

    def close(self) -> None:
        """Write what is left and end the thread."""
        if not self._closing.is_set():
            atexit.unregister(self.close)
            self._closing.set()
            self._some.set()
            self._thread.join()
            self._sink.close()

    def _drain(self) -> None:
        closing = False
        while not closing:
            self._some.wait()
            self._some.clear()
            closing = self._closing.wait(PERIOD)
            self._flush()  # once more after close was seen, so that nothing stays behind

    def _flush(self) -> None:
        count = len(self._lines)
        block = self._lines[:count]
        del self._lines[:count]  # lines that come meanwhile stand behind these
        try:
            if block:
                self._sink.write("\n".join(block) + "\n")
            self._complained = False
        except (OSError, ValueError) as error:  # a full disk, or a stream that somebody closed
            if not self._complained:
                log.error("the access log cannot be written (%s); its lines are lost until it can", error)
            self._complained = True


class _Stream:
    """A stream of somebody else's."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def close(self) -> None:
        """It is not ours to close."""


class _File:
    """A file that many processes append to: each block is one write, so no line is torn."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()

    def write(self, text: str) -> None:
        self._follow()
        os.write(self._descriptor, text.encode())

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _follow(self) -> None:
        """Put the file aside where it is full, and go over to the new one where anybody has done so."""
        here = os.fstat(self._descriptor)
        if self._limit and here.st_size >= self._limit:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # of several that find it full, one moves it
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == here.st_ino:
                    os.replace(self._path, f"{self._path}.1")
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        try:
            moved = os.stat(self._path).st_ino != here.st_ino
        except FileNotFoundError:
            moved = True
        if moved:
            os.close(self._descriptor)
            self._descriptor = self._open()


def access(settings: Settings) -> AccessLog | None:
    """The access log that the settings ask for."""
    path = settings.access_log
    return AccessLog(path, limit=settings.telemetry.access_log_bytes) if path is not None else None


_listener: logging.handlers.QueueListener | None = None


def configure(level: str = "INFO", stream: IO[str] | None = None) -> None:
    """Send everything under the ``torchrelay`` logger from ``level`` on to standard error, by way of a thread.

    A second call changes only the level. Raises ConfigurationError for a level that there is not.
    """
    global _listener
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if str(level).upper() not in known:
        raise ConfigurationError("telemetry.log_level", f"there is no level {level!r}; known here: {', '.join(known)}")
    root = logging.getLogger("torchrelay")
    root.setLevel(str(level).upper())
    if _listener is not None:
        return
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    # Not sys.stderr: in a replica that is Ray Serve's, which keeps lines back until it has many.
    writer = logging.StreamHandler(stream or sys.__stderr__)
    writer.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(logging.handlers.QueueHandler(lines))
    root.propagate = False
    _listener = logging.handlers.QueueListener(lines, writer)
    _listener.start()
    atexit.register(close)


def close() -> None:
    """Write what was logged so far, and log no more until ``configure`` is called again."""
    global _listener
    if _listener is None:
        return
    root = logging.getLogger("torchrelay")
    for handler in list(root.handlers):
        if isinstance(handler, logging.handlers.QueueHandler):
            root.removeHandler(handler)
    root.propagate = True
    _listener.stop()
    _listener = None
    atexit.unregister(close)
