"""Queries of the log files, and the records that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from typing_extensions import TypedDict

from serve_app.domain.validation import documented

LogName = Literal["server", "model", "access"]
LOG_NAMES: tuple[LogName, ...] = get_args(LogName)
MAX_LOG_RECORDS = 1000


@dataclass(frozen=True)
class LogQuery:
    """A filter of one log's records; empty fields match all."""

    log: LogName = "server"
    limit: int = 100
    level: str = ""  # the lowest level
    model: str = ""
    text: str = ""  # a part of the record, whatever its case


class LogRecordDocument(TypedDict):
    """A record of a log; fields that the record does not have are empty."""

    time: Annotated[str, documented("The server's local time.")]
    level: str
    source: Annotated[str, documented("The process and the logger.")]
    message: str


class LogPage(TypedDict):
    """Records of the head node's log, the newest first."""

    log: LogName
    records: list[LogRecordDocument]
