"""The response of a script that sets its status and headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class AMLResponse:
    """A response; with ``json_str`` its message is written as JSON."""

    def __init__(
        self,
        message: Any,
        status_code: int,
        response_headers: Mapping[str, str] | None = None,
        json_str: bool = False,
        run_function_failed: bool = False,
    ) -> None:
        self.status_code = status_code
        is_json = json_str or message is None
        text = json.dumps({} if message is None else message) if is_json else message
        self.data: bytes = text.encode() if isinstance(text, str) else bytes(text)
        self.headers = {
            "Content-Type": "application/json" if is_json else "text/html; charset=utf-8",
            "x-ms-run-function-failed": str(run_function_failed),
            **(response_headers or {}),
        }

    def get_data(self) -> bytes:
        return self.data
