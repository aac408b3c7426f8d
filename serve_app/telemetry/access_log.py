"""The access log: one line per request, in TorchServe's format or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote

import orjson

from serve_app.settings import Settings
from serve_app.telemetry.log_writer import AsyncWriter, FileSink, LogSink, StreamSink

_MAX_CACHED_NAME = 128  # characters
_FIXED_SIZE = 200  # approximate bytes of a line without its path


class AccessLog:
    """A writer of one line per request to a file or a stream, by default standard output.

    Any number of processes may append to one path; see FileSink and AsyncWriter.
    """

    def __init__(
        self,
        target: str | Path | IO[str] | None = None,
        form: Literal["text", "json"] = "text",
        limit: int = 0,
        mode: int = 0o600,
    ) -> None:
        self.json = form == "json"
        self._timestamp = TimestampFormatter()
        if isinstance(target, (str, Path)):
            sink: LogSink = FileSink(Path(target), limit, mode)
        else:
            sink = StreamSink(target or sys.stdout)
        self._writer = AsyncWriter(sink, "access log", format_record=self._format)

    def write(  # noqa: PLR0913  # the fields of a line
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
        client_ids: dict[str, str] | None = None,
        key: str = "",
    ) -> None:
        """Write the line of a request; ``client`` is host:port, ``path`` includes the query.

        ``client_ids`` are ids that the client sent; only the JSON format has them. ``key`` is the name of the
        request's key.
        """
        now, size = time.time(), _FIXED_SIZE + len(path)
        if client_ids:
            size += sum(map(len, client_ids.values()))
        record = (now, client, method, path, http_version, status, milliseconds, request_id, model, version)
        self._writer.put((*record, client_ids, key), size)

    def _format(self, record: Any) -> str:
        """Return a record's line; called in the writer's thread, so that a request does not wait for it."""
        now, client, method, path, http_version, status, milliseconds = record[:7]
        request_id, model, version, client_ids, key = record[7:]
        timestamp = self._timestamp(now)
        if self.json:
            line = {"time": timestamp, "client": client, "method": method, "path": path}
            line |= {"http_version": http_version, "status": status}
            line |= {"milliseconds": round(milliseconds, 3), "request_id": request_id}
            if model:
                line |= {"model": model, "version": version}
            if client_ids:
                line |= {"client_ids": client_ids}
            if key:
                line |= {"key": key}
            return encode_json_line(line)
        suffix = f" id={request_id}" if request_id else ""
        if model:
            suffix = f"{suffix} model={_escape_name(model)} version={_escape_name(version)}"
        if key:
            suffix = f"{suffix} key={_escape_name(key)}"
        request = f"{_escape_name(method)} {_escape(path)} HTTP/{_escape_name(http_version)}"
        return f'{timestamp} - /{_escape(client)} "{request}" {status} {int(milliseconds)}{suffix}'

    def close(self) -> None:
        """Write the remaining lines and end the thread."""
        self._writer.close()


def _escape(text: str) -> str:
    """Return a field of the text format: no character of it can end the field, the line or its quotes.

    A path arrives percent-decoded, so these characters are percent-encoded again, as UTF-8.
    """
    if text.isascii() and text.isprintable() and " " not in text and '"' not in text and "\\" not in text:
        return text
    return quote(text, safe=_SAFE_CHARACTERS, errors="backslashreplace")


_escape_cached = lru_cache(maxsize=1024)(_escape)


def _escape_name(text: str) -> str:
    """Return a field with few values. Long ones, which only a client chooses, are not kept."""
    return _escape_cached(text) if len(text) <= _MAX_CACHED_NAME else _escape(text)


# Letters and marks of a URL; "%" stays, because the query was not decoded.
_SAFE_CHARACTERS = "%!$&'()*+,-./:;<=>?@[]^_`{|}~#"


def encode_json_line(line: dict[str, Any]) -> str:
    """Return a line of the JSON format: ASCII without controls, which a terminal could interpret."""
    with contextlib.suppress(orjson.JSONEncodeError):  # an unpaired surrogate
        encoded = orjson.dumps(line)
        if encoded.isascii() and b"\x7f" not in encoded:
            return encoded.decode()
    return json.dumps(line, separators=(",", ":")).replace("\x7f", "\\u007f")


class TimestampFormatter:
    """A formatter of times in TorchServe's form, ``2026-11-20T13:24:41,180``; it caches the last second."""

    def __init__(self) -> None:
        self._second, self._text = 0, ""

    def __call__(self, now: float) -> str:
        second = int(now)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))
        return self._text + _MILLISECONDS[int((now - second) * 1000)]


_MILLISECONDS = tuple(f",{number:03d}" for number in range(1000))


def access_log(settings: Settings) -> AccessLog | None:
    """Return the access log of the settings; None where it is off."""
    path = settings.access_log
    if path is None:
        return None
    telemetry = settings.telemetry
    return AccessLog(path, telemetry.log_format, telemetry.access_log_bytes, settings.log_file_mode)
