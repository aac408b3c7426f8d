"""Sessions of the console: the key of a browser, which is kept here and never sent back to it."""

from __future__ import annotations

import secrets
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from serve_app.client import NO_RETRIES, AsyncClient, AuthenticationError

COOKIE = "torchrelay_session"
MAX_AGE_S = 12 * 3600.0  # since the last request
_TICKET_AGE_S = 30.0
_MAX_SESSIONS = 1000  # the session that was used least recently is dropped first


@dataclass(frozen=True)
class ServerAddresses:
    """The addresses of a server's ports; ``verify`` configures TLS, as in httpx."""

    inference: str
    management: str
    metrics: str
    verify: ssl.SSLContext | bool = True

    def create_client(self, key: str = "") -> AsyncClient:
        return AsyncClient(
            self.inference,
            self.management,
            60.0,
            token=key,
            verify=self.verify,
            metrics=self.metrics,
            retries=NO_RETRIES,
        )


@dataclass
class Session:
    """A user's client, the rights of the key, and values that the pages keep between requests."""

    client: AsyncClient
    addresses: ServerAddresses
    access: dict[str, Any]
    used_at: float = field(default_factory=time.monotonic)
    cache: dict[str, Any] = field(default_factory=dict)

    def has_right(self, right: str) -> bool:
        return right in self.access["rights"]

    @property
    def name(self) -> str:
        return str(self.access["name"])


class SessionStore:
    """The sessions of this process, by the random value of the browser's cookie."""

    def __init__(self, addresses: ServerAddresses) -> None:
        self.addresses = addresses
        self._sessions: dict[str, Session] = {}
        self._tickets: dict[str, tuple[float, str]] = {}
        self._anonymous: Session | None = None

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie, unless it has expired."""
        session = self._sessions.get(cookie)
        if session is None:
            return None
        now = time.monotonic()
        if now - session.used_at > MAX_AGE_S:
            del self._sessions[cookie]
            return None
        session.used_at = now
        return session

    async def find_anonymous(self) -> Session | None:
        """Return the session of a server that requires no key; None where it requires one.

        Raises ServerError and TransportError.
        """
        client = self._anonymous.client if self._anonymous else self.addresses.create_client()
        access = await _get_access(client)
        if access["required"]:
            self._anonymous = None
            return None
        if self._anonymous is None:
            self._anonymous = Session(client, self.addresses, access)
        return self._anonymous

    async def log_in(self, key: str) -> str:
        """Create a session for a key; return a ticket, which is exchanged for its cookie once.

        Raises AuthenticationError for a key that the server refuses, ServerError and TransportError.
        """
        client = self.addresses.create_client(key)
        session = Session(client, self.addresses, await client.access())
        while len(self._sessions) >= _MAX_SESSIONS:
            oldest = min(self._sessions, key=lambda cookie: self._sessions[cookie].used_at)
            del self._sessions[oldest]
        cookie, ticket = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._sessions[cookie] = session
        self._tickets[ticket] = time.monotonic() + _TICKET_AGE_S, cookie
        return ticket

    def redeem(self, ticket: str) -> str | None:
        """Return the cookie of a ticket that is used for the first time and has not expired."""
        expires, cookie = self._tickets.pop(ticket, (0.0, ""))
        self._tickets = {key: value for key, value in self._tickets.items() if value[0] > time.monotonic()}
        return cookie if time.monotonic() < expires else None

    def log_out(self, cookie: str) -> None:
        self._sessions.pop(cookie, None)


async def _get_access(client: AsyncClient) -> dict[str, Any]:
    """Return the rights of a client without a key; ``required`` where the server refuses it."""
    try:
        return await client.access()
    except AuthenticationError:
        return {"required": True, "name": "", "rights": [], "models": []}
