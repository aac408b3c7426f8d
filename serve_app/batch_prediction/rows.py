"""The rows of a batch prediction and their results."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from serve_app.errors import RelayError


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of an input: its number, and the body of its request, or the reason why it has none."""

    number: int  # of a line of JSONL from 1; of a row of Parquet from 0
    body: bytes = b""
    content_type: str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row: the value of its prediction, or the reason and the message of its error."""

    number: int
    prediction: Any = None
    reason: str = ""
    message: str = ""

    @classmethod
    def of_error(cls, number: int, error: RelayError) -> RowResult:
        detail = str(getattr(error, "detail", "")).strip()
        last_line = detail.splitlines()[-1] if detail else ""
        message = f"{error}: {last_line}" if last_line and last_line not in str(error) else str(error)
        return cls(number, reason=error.reason, message=message)


def decode_body(body: bytes) -> Any:
    """Return the value of a response: that of its JSON, else its text, else ``{"base64": …}``."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
