"""The keys of a server's key file, which authenticate requests."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import httpx

_EXPIRED = "expired_token"  # the reason of a refusal


KeyKind = Literal["inference", "management"]


class KeyFile(httpx.Auth):
    """The key of one kind in a server's key_file.json, renewed when it has expired."""

    def __init__(self, path: Path, kind: KeyKind, management: str) -> None:
        self._path = path
        self._kind = kind
        self._token_url = httpx.URL(management).join("/token")

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        headers = self.headers(self._kind)
        request.headers.update(headers)
        response = yield request
        if headers and response.headers.get("x-torchrelay-reason") == _EXPIRED:
            # The server writes a new key into the file.
            yield httpx.Request(
                "GET", self._token_url, params={"type": self._kind}, headers=self.headers("API")
            )
            request.headers.update(self.headers(self._kind))
            yield request

    def headers(self, kind: str) -> dict[str, str]:
        """Return the header with the file's key of this kind; nothing while there is no such key."""
        try:
            return {"authorization": f"Bearer {json.loads(self._path.read_text())[kind]['key']}"}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
