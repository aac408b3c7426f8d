"""Which key a request shows."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import httpx

EXPIRED = "expired_token"  # the reason of a refusal
_Flow = Generator[httpx.Request, httpx.Response, None]


class Bearer(httpx.Auth):
    """Every request shows this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def shown(self) -> str:
        return f"Bearer {self._key}"

    def auth_flow(self, request: httpx.Request) -> _Flow:
        request.headers["authorization"] = self.shown()
        yield request


class KeyFile(httpx.Auth):
    """Every request shows the key of its kind in a server's key_file.json, and one that has expired is renewed."""

    def __init__(self, path: Path, kind: Literal["inference", "management"], management: str) -> None:
        self._path = path
        self._kind = kind
        self._token = httpx.URL(management).join("/token")

    def shown(self, kind: str = "") -> str | None:
        """The file's key as a request says it; None where there is none (yet)."""
        try:
            return f"Bearer {json.loads(self._path.read_text())[kind or self._kind]['key']}"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def renewal(self) -> httpx.Request:
        """What makes the server write a new key into the file, for one that has expired."""
        request = httpx.Request("GET", self._token, params={"type": self._kind})
        key = self.shown("API")
        if key is not None:
            request.headers["authorization"] = key
        return request

    def auth_flow(self, request: httpx.Request) -> _Flow:
        key = self.shown()
        if key is None:
            yield request
            return
        request.headers["authorization"] = key
        response = yield request
        if response.headers.get("x-torchrelay-reason") == EXPIRED:
            yield self.renewal()
            request.headers["authorization"] = self.shown() or key
            yield request
