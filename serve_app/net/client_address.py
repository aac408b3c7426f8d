"""The address of a client behind proxies, from ``X-Forwarded-For``.

Any client can send this header, so only the entries that trusted proxies appended count. Read from the right,
the first address that is no trusted proxy's is the client's. uvicorn's own evaluation is switched off: it
trusts every process of the machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from functools import lru_cache

from serve_app.errors import ConfigurationError
from serve_app.settings import is_loopback

# It makes HAProxy append the address.
_HAPROXY_CALLBACK = "serve_app.deployments.ray_internals.haproxy:install"


_MAX_CACHED_CLIENTS = 4096
_MAX_CACHED_BYTES = 64  # of a header's value


class TrustedProxies:
    """The networks of the proxies whose entries count. Raises ConfigurationError for an invalid one.

    ``behind_haproxy``: a peer on loopback is our HAProxy, whose entry is the last one. Other entries with a
    loopback address count no more than any client's.
    """

    def __init__(self, networks: Sequence[str] = (), behind_haproxy: bool = False) -> None:
        self._behind_haproxy = behind_haproxy
        try:
            self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]
        except ValueError as error:
            cure = "write addresses or networks such as 10.0.0.0/8"
            raise ConfigurationError("telemetry.trusted_proxies", f"{error}; {cure}") from None
        # Addresses take 8 µs to parse, and most requests come from few clients.
        self._resolve_cached = lru_cache(_MAX_CACHED_CLIENTS)(self._resolve)

    def resolve(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the client's address; ``forwarded`` are the header's values, in their order.

        It is ``peer`` unless that is trusted, and never an entry that is no address.
        """
        if len(forwarded) == 1 and len(forwarded[0]) <= _MAX_CACHED_BYTES:
            return self._resolve_cached(peer, (forwarded[0],))
        return self._resolve(peer, forwarded)

    def _resolve(self, peer: str, forwarded: Sequence[str]) -> str:
        client = peer
        entries = [entry.strip() for value in forwarded for entry in value.split(",")]
        if self._behind_haproxy and is_loopback(peer) and entries and _is_address(entries[-1]):
            client = entries.pop()
        for entry in reversed(entries):
            if not self._trusts(client) or not _is_address(entry):
                return client
            client = entry
        return client

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)


NO_PROXIES = TrustedProxies()


def inference_proxies(networks: Sequence[str], environ: Mapping[str, str]) -> TrustedProxies:
    """Return the proxies of the inference port: the configured ones, and HAProxy where it is in front."""
    has_haproxy = (
        environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        and environ.get("RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH") == _HAPROXY_CALLBACK
    )
    return TrustedProxies(networks, has_haproxy)


def _is_address(text: str) -> bool:
    if "%" in text:  # the scope of an IPv6 address may be any text
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
