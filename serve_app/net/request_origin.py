"""The origin of a request: its client's address behind proxies, and the page for which a browser sent it.

Any client can send ``X-Forwarded-For``, so only the entries that trusted proxies appended count. Read from
the right, the first address that is no trusted proxy's is the client's. uvicorn's own evaluation is switched
off: it trusts every process of the machine.

Any page may make a browser send requests to this machine: with a form or ``fetch`` across origins, or under
a name of its own that it rebinds to this machine's address after loading (DNS rebinding). Browsers mark the
first kind by ``Origin`` and ``Sec-Fetch-Site``, and the second kind by the name in ``Host``. Other
clients send none of the marks, and an address or a name of this server as host.

No page can open a gRPC connection: browsers have no API that sends HTTP/2 trailers, and the gRPC ports do not
serve gRPC-Web.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from serve_app.errors import ConfigurationError, Forbidden
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
            return self._resolve_cached(peer, tuple(forwarded))
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


_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
# TorchServe's routes that run a model or make a key with every method, by their first and last segment.
_ACTIVE_ROUTES = frozenset(("predictions", "explanations", "invocations", "wfpredict", "token"))
_ACTIVE_ENDS = frozenset(("predict", "explain", "infer", "invoke", "invocations"))
_MAX_REMEMBERED_HOSTS = 256


class CrossSiteRequest(Forbidden, reason="cross_site", fields=("origin", "setting")):
    """A request that a browser sent for a page of another site."""

    template = "Pages of {origin:.100} may not send this request: name the page's origin in {setting}."


class HostNotAllowed(Forbidden, reason="host_not_allowed", fields=("host", "setting")):
    """A request whose Host header is no name of this server, as after DNS rebinding."""

    template = "The host {host:.100} is no name of this server: name it in {setting}."


class CrossSitePolicy:
    """The rules of one port.

    ``checks_hosts`` returns whether hosts other than the loopback's and ``allowed_hosts`` are refused.
    ``allowed_origin`` is that of CORS, None where a port has no CORS: pages of this origin may send every
    request. ``section`` is the section of the settings that errors name. Clients of a port whose
    ``bound_host`` is not the loopback's may use addresses in place of names, which no page can rebind.
    """

    def __init__(
        self,
        section: str,
        allowed_hosts: tuple[str, ...],
        checks_hosts: Callable[[], bool],
        allowed_origin: str | None = None,
        bound_host: str = "127.0.0.1",
    ) -> None:
        self._section = section
        self._allowed_hosts = tuple(pattern.lower() for pattern in allowed_hosts)
        self._checks_hosts = checks_hosts
        self._allowed_origin = allowed_origin
        self._accepts_addresses = not is_loopback(bound_host)
        self._known_hosts: set[str] = set()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Check a request. Raises CrossSiteRequest and HostNotAllowed.

        Costs three look-ups for a client that is no browser.
        """
        host = headers.get("host")
        if host is not None and host not in self._known_hosts and self._checks_hosts():
            self._check_host(host)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None and site is None:
            return
        if method in _SAFE_METHODS and (method == "OPTIONS" or not _is_active(path)):
            return
        if self._is_foreign(origin, site, host, headers.get("referer", "")):
            raise CrossSiteRequest(origin or "another site", self._origin_setting)

    @property
    def _origin_setting(self) -> str:
        return f"{self._section}.{'allowed_hosts' if self._allowed_origin is None else 'cors_allowed_origin'}"

    def _is_foreign(self, origin: str | None, site: str | None, host: str | None, referer: str) -> bool:
        """Return whether a page of another origin sends a request.

        Images and links have no Origin. A page of another port of this host has the same site, so that its
        Referer decides, which cannot be forged and may be missing.
        """
        if self._allowed_origin == "*":
            return False
        if origin is None:
            if site != "same-site":
                return site == "cross-site"
            origin, host = _parse_origin(referer), None
        if not origin:
            return True
        authority = origin.partition("://")[2]
        if origin == self._allowed_origin or (authority and authority == host):
            return False
        # A reverse proxy may replace Host; the page then has one of the names that the operator allows.
        name = _parse_name(authority)
        return not any(pattern != "*" and fnmatchcase(name, pattern) for pattern in self._allowed_hosts)

    def _check_host(self, host: str) -> None:
        """Raise HostNotAllowed for a host that is no name of this server; remember the others."""
        name = _parse_name(host)
        is_known = (
            is_loopback(name)
            or name.endswith(".localhost")
            or any(fnmatchcase(name, pattern) for pattern in self._allowed_hosts)
            or (self._accepts_addresses and _is_address(name))
        )
        if not is_known:
            raise HostNotAllowed(host, f"{self._section}.allowed_hosts")
        if len(self._known_hosts) < _MAX_REMEMBERED_HOSTS:
            self._known_hosts.add(host)


def _is_active(path: str) -> bool:
    """Return whether a GET of this path changes something or runs a model."""
    segments = path.rstrip("/").split("/")[1:]
    return bool(segments) and (
        segments[0] in _ACTIVE_ROUTES
        or segments[-1] in _ACTIVE_ENDS
        or segments[-1].endswith((":predict", ":explain"))
    )


def _parse_origin(url: str) -> str:
    """Return the origin of a URL; empty for an empty one."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.partition('/')[0]}" if separator else ""


def _parse_name(authority: str) -> str:
    """Return the host of ``host:port`` in lower case; an IPv6 address without its brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().rstrip(".")
