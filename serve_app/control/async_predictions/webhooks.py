"""Webhooks to a caller's URL when a prediction has ended, signed as standardwebhooks.com specifies.

A request to a caller's URL reaches every host that this machine reaches, so no URL is allowed until the
operator names patterns of them (``async_predictions.webhook_urls``). A host that a pattern names in full may
be private; one that a star matches must have a public address. No redirect is followed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson

from serve_app.errors import BadRequest, ConfigurationError
from serve_app.settings import AsyncPredictionSettings, read_secret

log = logging.getLogger(__name__)

_MAX_RETRY_PAUSE = 300.0  # seconds between two attempts
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_PORTS = {"http": 80, "https": 443}


class WebhookSender:
    """A sender of webhooks. Raises ConfigurationError without a secret, or for an invalid pattern."""

    def __init__(self, settings: AsyncPredictionSettings, environ: Mapping[str, str] = os.environ) -> None:
        self._patterns = [_pattern(text) for text in settings.webhook_urls]
        self._secret = _read_secret(settings.webhook_secret, environ) if self._patterns else b""
        self._attempts = settings.webhook_attempts
        self._timeout = settings.webhook_timeout
        self._first_pause = settings.webhook_backoff
        self._client: Any = None

    def check(self, url: str) -> None:
        """Raise BadRequest for a URL that is not allowed."""
        if not self._patterns:
            raise BadRequest("No webhook is allowed here: async_predictions.webhook_urls names none.")
        try:
            parts = urlsplit(url)
            allowed = parts.username is None and any(_matches(parts, pattern) for pattern in self._patterns)
        except ValueError:
            allowed = False
        if not allowed:
            raise BadRequest(
                f"The webhook {url[:200]} is none of those that async_predictions.webhook_urls allows."
            )

    async def send(
        self, url: str, id: str, document: Mapping[str, Any], headers: Mapping[str, str] = _NO_HEADERS
    ) -> bool:
        """POST a document until the response is 2xx, with growing pauses; return whether it was delivered.

        ``headers`` are sent beside those of the signature.
        """
        body = orjson.dumps(document)
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(min(self._first_pause * 2 ** (attempt - 1), _MAX_RETRY_PAUSE))
            error = await self._try_post(url, {**headers, **self._signed_headers(id, body)}, body)
            if error is None:
                return True
            log.info("the webhook of prediction %s was not taken (attempt %d): %s", id, attempt + 1, error)
        log.warning(
            "The webhook of async prediction %s was not accepted in %d attempts; its result stays: %s",
            id,
            self._attempts,
            error,
        )
        return False

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _signed_headers(self, id: str, body: bytes) -> dict[str, str]:
        at = str(int(time.time()))
        digest = hmac.digest(self._secret, f"{id}.{at}.".encode() + body, hashlib.sha256)
        signature = f"v1,{base64.b64encode(digest).decode()}"
        signed = {"webhook-id": id, "webhook-timestamp": at, "webhook-signature": signature}
        return {**signed, "content-type": "application/json"}

    def _names_host(self, url: Any) -> bool:
        """Return whether a pattern that matches a URL has its host in full."""
        parts = urlsplit(str(url))
        named = (pattern for pattern in self._patterns if not set("*?[") & set(pattern.hostname or ""))
        return any(_matches(parts, pattern) for pattern in named)

    async def _try_post(self, url: str, headers: dict[str, str], body: bytes) -> str | None:
        """Return the problem of one attempt, if any. httpx limits each step of it, and this all of them."""
        try:
            return await asyncio.wait_for(self._post(url, headers, body), self._timeout)
        except asyncio.TimeoutError:
            return f"it took longer than webhook_timeout ({self._timeout:g} s)"

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> str | None:
        import httpx  # late, as the next: most servers never need it

        from serve_app.net.egress import AsyncPublicTransport

        if self._client is None:
            self._client = httpx.AsyncClient(
                transport=AsyncPublicTransport(self._names_host),
                timeout=self._timeout,
                follow_redirects=False,
                trust_env=False,
            )
        try:
            async with self._client.stream("POST", url, headers=headers, content=body) as response:
                return None if response.is_success else f"status {response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            return f"{type(exc).__name__}: {exc}"


def _pattern(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in _PORTS and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:  # an invalid port
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        cure = "write scheme, host and path, and * for any part of host or path: https://*.example.com/*"
        raise ConfigurationError("async_predictions.webhook_urls", f"{text!r} is no pattern of URLs; {cure}")
    return parts


def _matches(url: SplitResult, pattern: SplitResult) -> bool:
    """Match part by part, so that a star in a host ends with the host."""
    if url.scheme != pattern.scheme or url.hostname is None:
        return False
    ports = [parts.port or _PORTS[parts.scheme] for parts in (url, pattern)]
    host, path = pattern.hostname or "", pattern.path or "/"
    return ports[0] == ports[1] and fnmatchcase(url.hostname, host) and fnmatchcase(url.path or "/", path)


def _read_secret(setting: str, environ: Mapping[str, str]) -> bytes:
    problem = "webhooks are signed, and there is no secret"
    return read_secret("async_predictions.webhook_secret", setting, problem, environ).encode()
