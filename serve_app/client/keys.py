"""The key that authenticates a request."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import httpx

EXPIRED = "expired_token"  # the reason of a refusal
_Flow = Generator[httpx.Request, httpx.Response, None]


class BearerAuth(httpx.Auth):
    """A fixed key, sent with every request."""

    def __init__(self, key: str) -> None:
        self._key = key

    def authorization(self) -> str:
        """Return the value of the header ``authorization``."""
        return f"Bearer {self._key}"

    def auth_flow(self, request: httpx.Request) -> _Flow:
        request.headers["authorization"] = self.authorization()
        yield request


class KeyFile(httpx.Auth):
    """The key of one kind in a server's key_file.json, renewed when it has expired."""

    def __init__(self, path: Path, kind: Literal["inference", "management"], management: str) -> None:
        self._path = path
        self._kind = kind
        self._token_url = httpx.URL(management).join("/token")

    def authorization(self, kind: str = "") -> str | None:
        """Return the header ``authorization`` with the file's key; None while there is no such key."""
        try:
            return f"Bearer {json.loads(self._path.read_text())[kind or self._kind]['key']}"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def renewal_request(self) -> httpx.Request:
        """Return the request that makes the server write a new key into the file."""
        request = httpx.Request("GET", self._token_url, params={"type": self._kind})
        authorization = self.authorization("API")
        if authorization is not None:
            request.headers["authorization"] = authorization
        return request

    def auth_flow(self, request: httpx.Request) -> _Flow:
        authorization = self.authorization()
        if authorization is None:
            yield request
            return
        request.headers["authorization"] = authorization
        response = yield request
        if response.headers.get("x-torchrelay-reason") == EXPIRED:
            yield self.renewal_request()
            request.headers["authorization"] = self.authorization() or authorization
            yield request
