"""The access log: one line a request, in TorchServe's form or as JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from serve_app.settings import Settings
from serve_app.telemetry.sink import Drain, File, Stream

_ABOUT = 200  # bytes of a line beside its path


class AccessLog:
    """One line a request, in TorchServe's form or as JSON, to a file or a stream; standard output by default.

    Any number of processes may append to one path; see sink.File and sink.Drain.
    """

    def __init__(
        self,
        target: str | Path | IO[str] | None = None,
        form: Literal["text", "json"] = "text",
        limit: int = 0,
    ) -> None:
        self.json = form == "json"
        self._stamp = Stamp()
        file = isinstance(target, (str, Path))
        sink = File(Path(target), limit) if file else Stream(target or sys.stdout)
        self._drain = Drain(sink, "access log", form=self._text)

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
        came_with: dict[str, str] | None = None,
    ) -> None:
        """One request was answered; ``client`` is its host:port, ``path`` has its query.

        ``came_with`` are ids that the request brought itself; they stand in the JSON form alone.
        """
        record = time.time(), client, method, path, http_version, status, milliseconds, request_id, model, version
        self._drain.put((record, came_with), _ABOUT + len(path))

    def _text(self, record: Any) -> str:
        """A record's line: in the drain's thread, so that a request does not wait for it."""
        (now, client, method, path, http_version, status, milliseconds, request_id, model, version), came_with = record
        stamp = self._stamp(now)
        if self.json:
            line = {"time": stamp, "client": client, "method": method, "path": path, "http_version": http_version}
            line |= {"status": status, "milliseconds": round(milliseconds, 3), "request_id": request_id}
            if model:
                line |= {"model": model, "version": version}
            if came_with:
                line |= {"came_with": came_with}
            return orjson.dumps(line).decode()
        if not path.isprintable():  # a line break in a path would forge a line
            path = path.encode("unicode_escape").decode()
        about = f" id={request_id}" if request_id else ""
        if model:
            about = f"{about} model={model} version={version}"
        return f'{stamp} - /{client} "{method} {path} HTTP/{http_version}" {status} {int(milliseconds)}{about}'

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._drain.close()


class Stamp:
    """A moment as TorchServe writes it, ``2026-11-20T13:24:41,180``; a second's text is made once."""

    def __init__(self) -> None:
        self._second, self._text = 0, ""

    def __call__(self, now: float) -> str:
        second = int(now)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
        return self._text + _MILLISECONDS[int((now - second) * 1000)]


_MILLISECONDS = tuple(f",{number:03d}" for number in range(1000))


def access(settings: Settings) -> AccessLog | None:
    """The access log that the settings ask for."""
    path = settings.access_log
    if path is None:
        return None
    return AccessLog(path, settings.telemetry.log_format, settings.telemetry.access_log_bytes)
