"""Which key a request shows."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import httpx

_Flow = Generator[httpx.Request, httpx.Response, None]


class Bearer(httpx.Auth):
    """Every request shows this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> _Flow:
        request.headers["authorization"] = f"Bearer {self._key}"
        yield request


class KeyFile(httpx.Auth):
    """Every request shows the key of its kind in a server's key_file.json, and one that has expired is renewed."""

    def __init__(self, path: Path, kind: Literal["inference", "management"], management: str) -> None:
        self._path = path
        self._kind = kind
        self._token = httpx.URL(management).join("/token")

    def auth_flow(self, request: httpx.Request) -> _Flow:
        if self._sign(request, self._kind):
            response = yield request
            if response.headers.get("x-torchrelay-reason") == "expired_token":
                renewal = httpx.Request("GET", self._token, params={"type": self._kind})
                self._sign(renewal, "API")
                yield renewal
                self._sign(request, self._kind)
                yield request
        else:
            yield request

    def _sign(self, request: httpx.Request, kind: str) -> bool:
        """Put the file's key into the request; False where there is none (yet)."""
        try:
            request.headers["authorization"] = f"Bearer {json.loads(self._path.read_text())[kind]['key']}"
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True
