"""The public keys of the issuer of JSON Web Tokens, from its URL or a file.

Management alone fetches them, and every process receives them with the routing table. They are fetched again
after ``auth.jwt.cache_seconds``, and earlier when a token names an unknown key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from serve_app.domain.urls import redact_url
from serve_app.settings import JwtSettings

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MAX_BYTES = 256 * 1024
_MAX_KEYS = 64
_RETRY_S = 10.0  # after a failure, and between two refreshes for unknown keys
# Public members of RSA, elliptic-curve and Edwards-curve keys; a symmetric key has none of a type here.
_MEMBERS = ("kty", "kid", "alg", "use", "n", "e", "crv", "x", "y")
_KEY_TYPES = ("RSA", "EC", "OKP")


class JwkSetSource:
    """A periodically fetched set of public keys; ``on_change`` is called with each different one, as JSON.

    While no set can be fetched the last one is in force: an issuer that is down has revoked none.
    """

    def __init__(self, settings: JwtSettings, root: Path, on_change: Callable[[str], None]) -> None:
        self._settings = settings
        self._file = root / settings.jwks_file
        self._on_change = on_change
        self._keys = ""
        self._requested = asyncio.Event()

    def request_refresh(self) -> None:
        """Fetch the set soon, because a token names a key that is not in it."""
        self._requested.set()

    async def refresh(self) -> bool:
        """Fetch the set now; return whether that succeeded."""
        url = self._settings.jwks_url
        source = redact_url(url) if url else str(self._file)
        try:
            keys = parse_jwk_set(await asyncio.wait_for(self._fetch(), _TIMEOUT_S))
        except (
            asyncio.TimeoutError,
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            ValueError,
            RecursionError,
        ) as error:
            cause = str(error).replace(url, source) if url else error  # httpx names the URL
            cause = cause or f"{type(error).__name__} after {_TIMEOUT_S:g} s"
            state = "the last ones stay in force" if self._keys else "no token is accepted"
            log.error("the keys of token issuers at %s cannot be read (%s); %s", source, cause, state)
            return False
        if keys != self._keys:
            self._keys = keys
            self._on_change(keys)
        return True

    async def run(self) -> None:
        """Keep the set up to date until cancelled."""
        while True:
            started = time.monotonic()
            period = self._settings.cache_seconds if await self.refresh() else _RETRY_S
            await asyncio.sleep(min(_RETRY_S, period))  # a flood of unknown keys fetches no more often
            remaining = period - (time.monotonic() - started)
            if remaining > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._requested.wait(), remaining)
            self._requested.clear()

    async def _fetch(self) -> bytes:
        if not self._settings.jwks_url:
            return await asyncio.to_thread(_read_file, self._file)
        body = bytearray()
        async with (
            httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("GET", self._settings.jwks_url) as response,
        ):
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes")
        return bytes(body)


def parse_jwk_set(document: bytes) -> str:
    """Return the usable public keys of a JWK set as canonical JSON. Raises ValueError."""
    if len(document) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    parsed: Any = json.loads(document)
    keys = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(keys, list):
        raise ValueError("no JWK set: it is an object with a list of keys")
    usable = [
        {name: key[name] for name in _MEMBERS if isinstance(key.get(name), str)}
        for key in keys
        if isinstance(key, dict) and key.get("kty") in _KEY_TYPES and key.get("use", "sig") == "sig"
    ]
    if not usable or len(usable) > _MAX_KEYS:
        raise ValueError(f"it has {len(usable)} public keys for signatures, and must have 1 to {_MAX_KEYS}")
    return json.dumps({"keys": usable}, sort_keys=True)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)
