"""Reading of the log files for the management API: the newest records that match a query.

Only the last 8 MiB of a file are searched, so that a request takes milliseconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import orjson

from serve_app.domain.log_query import LogName, LogQuery, LogRecordDocument
from serve_app.settings import Settings
from serve_app.telemetry.logs import LEVELS, MODEL_LOG, SERVER_LOG

_MAX_SEARCHED_BYTES = 8 << 20
_MAX_MESSAGE = 8 << 10  # characters of a message that are returned
_TIME = r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3})"
_LINE = re.compile(rf"{_TIME} \[(?P<level>\w+) *\] (?P<source>.*?) - (?P<message>.*)", re.DOTALL)
_ACCESS_LINE = re.compile(rf"{_TIME} - (?P<message>.*)", re.DOTALL)
_JSON_START = '{"time":'
# The thread of a replica, and the end of a line of the access log; no field of them has a space.
_THREAD = re.compile(r"W-\w+(\.rank\d+)?-(?P<model>\S+)_[^\s_]+ .*", re.DOTALL)
_ACCESS_FIELDS = re.compile(
    r'/\S* "\S* \S* HTTP/\S*" \d+ -?\d+( id=\S*)?( model=(?P<model>\S+) version=\S*)?( key=\S*)?'
)
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}  # TorchServe's names


def read_records(settings: Settings, query: LogQuery) -> list[LogRecordDocument]:
    """Return the newest records of a log that match, the newest first; none where there is no file.

    Blocking.
    """
    path = _path(settings, query.log)
    if path is None:
        return []
    return list(islice(_filter(query, path), query.limit))


def _path(settings: Settings, log: LogName) -> Path | None:
    if log == "access":
        return settings.access_log
    return settings.log_dir / (MODEL_LOG if log == "model" else SERVER_LOG)


def _filter(query: LogQuery, path: Path) -> Iterator[LogRecordDocument]:
    levels = LEVELS[LEVELS.index(query.level) :] if query.level else ()
    text = query.text.lower()
    for raw in _records(path):
        if text and text not in raw.lower():
            continue
        if query.model not in raw:
            continue
        model, record = _parse(raw)
        if query.model and model != query.model:
            continue
        if not levels or record["level"] in levels:
            yield record


def _records(path: Path) -> Iterator[str]:
    """Yield the records at the end of a file, the last one first; a record may have several lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_SEARCHED_BYTES))
            lines = file.read(_MAX_SEARCHED_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    if size > _MAX_SEARCHED_BYTES:
        del lines[0]  # a part of a line
    following: list[str] = []
    for line in reversed(lines):
        if line.startswith(_JSON_START) or re.match(_TIME, line):
            yield "\n".join((line, *reversed(following)))
            following = []
        else:
            following.append(line)
    if following and size <= _MAX_SEARCHED_BYTES:
        yield "\n".join(reversed(following))


def _parse(raw: str) -> tuple[str, LogRecordDocument]:
    """Return a record and its model, which is empty for a record of no model."""
    if raw.startswith(_JSON_START):
        try:
            return _parse_json(raw)
        except orjson.JSONDecodeError:
            pass
    match = _LINE.fullmatch(raw) or _ACCESS_LINE.fullmatch(raw)
    if match is None:
        return "", {"time": "", "level": "", "source": "", "message": raw[:_MAX_MESSAGE]}
    fields = match.groupdict()
    level = fields.get("level") or ""
    source = fields.get("source") or ""
    named = _THREAD.fullmatch(source) if source else _ACCESS_FIELDS.fullmatch(fields["message"])
    return (named["model"] or "") if named is not None else "", {
        "time": fields["time"],
        "level": _LEVELS.get(level, level),
        "source": source,
        "message": fields["message"][:_MAX_MESSAGE],
    }


def _parse_json(raw: str) -> tuple[str, LogRecordDocument]:
    fields = orjson.loads(raw)
    model = str(fields.get("model", ""))
    time, level, message = (fields.pop(name, "") for name in ("time", "level", "message"))
    source = " ".join(str(fields.pop(name, "")) for name in ("process", "replica", "logger"))
    rest = " ".join(f"{name}={value}" for name, value in fields.items())
    message = " ".join(part for part in (message, rest) if part)[:_MAX_MESSAGE]
    return model, {"time": time, "level": level, "source": " ".join(source.split()), "message": message}
