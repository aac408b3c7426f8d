"""Logs that never hold up the event loop: what is said is kept in memory, a thread writes it.

A write to a full pipe or a slow disk can take longer than a request; and many lines formatted at
once keep the interpreter from everybody else. So a line is made where it belongs, for about a
microsecond, and written somewhere else.
"""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, Literal

import orjson

from serve_app.errors import ConfigurationError

log = logging.getLogger("torchrelay.logs")

PERIOD = 0.5  # seconds between two writes of the access log, at least
_FORMAT = "%(asctime)s [%(levelname)-5s] %(name)s - %(message)s"


class AccessLog:
    """One line a request, in TorchServe's form or as JSON, to a file or a stream; standard output by default.

    A path is opened for appending, its folder made where it is missing. What was written is out after
    ``PERIOD`` seconds, and when the log is closed or the interpreter ends.
    """

    def __init__(self, target: str | Path | IO[str] | None = None, form: Literal["text", "json"] = "text") -> None:
        if isinstance(target, str | Path):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            self._stream: IO[str] = open(target, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
            self._owned = True
        else:
            self._stream, self._owned = target or sys.stdout, False
        self._json = form == "json"
        self._lines: list[str] = []
        self._some = threading.Event()
        self._closing = threading.Event()
        self._second, self._stamp = 0, ""
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
            if self._owned:
                self._stream.close()

    def _drain(self) -> None:
        complained = False
        while not self._closing.is_set():
            self._some.wait()
            self._some.clear()
            self._closing.wait(PERIOD)
            count = len(self._lines)
            block = self._lines[:count]
            del self._lines[:count]  # lines that come meanwhile stand behind these
            try:
                self._stream.write("\n".join(block) + "\n" if block else "")
                self._stream.flush()
                complained = False
            except (OSError, ValueError) as error:  # a full disk, or a stream that somebody closed
                if not complained:
                    log.error("the access log cannot be written (%s); its lines are lost until it can", error)
                complained = True


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
    writer = logging.StreamHandler(stream or sys.stderr)
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
