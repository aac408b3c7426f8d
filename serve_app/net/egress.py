"""Outgoing HTTP requests to hosts that a client chose: only public addresses are connected to.

A host is resolved once for each request, and the connection goes to an address that was checked, so a name
server cannot answer the check and the connection differently (DNS rebinding). Every redirect is a request
of its own. No connection is kept: one to an address may not serve a second host name of that address.

Where the environment names a proxy for a URL, the proxy resolves the host. A host that resolves here as well
must be public, and the proxy decides about the others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from urllib.request import getproxies, proxy_bypass

import httpx

Resolver = Callable[[str, int], Sequence[str]]  # host and port -> addresses

_LIMITS = httpx.Limits(max_keepalive_connections=0)
_MAX_ADDRESSES = 4  # of one host, tried in turn
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_PORTS = {"http": 80, "https": 443}


class PrivateAddress(httpx.ConnectError):
    """The refusal to connect to a host none of whose addresses is public."""

    def __init__(self, host: str) -> None:
        super().__init__(f"{host} is not a public address")
        self.host = host


def is_public(address: str) -> bool:
    """Return whether an IP address is reachable from the whole internet.

    Private, loopback, link-local, shared (CGNAT), multicast and reserved addresses are not. An IPv6 address
    that contains an IPv4 address (mapped, 6to4, Teredo, NAT64) is as public as that.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the system resolves it; numeric forms such as 2130706433 too."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Policy:
    """The choice of addresses for a request; hosts for which ``is_exempt`` is true may be private."""

    def __init__(
        self, is_exempt: Callable[[httpx.URL], bool] | None = None, resolver: Resolver = resolve
    ) -> None:
        self._is_exempt = is_exempt or (lambda url: False)
        self._resolver = resolver

    def addresses(self, url: httpx.URL) -> list[str]:
        """Return the addresses that the request may connect to. Raises PrivateAddress and ConnectError."""
        host = url.host
        try:
            found = self._resolver(url.raw_host.decode("ascii"), url.port or _PORTS.get(url.scheme, 0))
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} cannot be resolved: {error}") from None
        allowed = list(found) if self._is_exempt(url) else [one for one in found if is_public(one)]
        if not allowed:
            raise PrivateAddress(host)
        return allowed[:_MAX_ADDRESSES]


def _requests(request: httpx.Request, addresses: Sequence[str]) -> Iterator[httpx.Request]:
    """Yield the request for each address; its Host header and TLS name remain those of its URL."""
    for address in addresses:
        yield httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
        )


class PublicTransport(httpx.BaseTransport):
    """A transport to public addresses, directly or through the environment's proxy.

    ``is_exempt`` selects URLs whose host may be private.
    """

    def __init__(
        self, resolver: Resolver = resolve, is_exempt: Callable[[httpx.URL], bool] | None = None
    ) -> None:
        self._policy = _Policy(is_exempt, resolver)
        self._direct = httpx.HTTPTransport(limits=_LIMITS)
        self._proxies: dict[str, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = _environment_proxy(request.url)
        if proxy is not None:
            return self._handle_proxied(request, proxy)
        failure: httpx.TransportError = PrivateAddress(request.url.host)
        for attempt in _requests(request, self._policy.addresses(request.url)):
            try:
                return self._direct.handle_request(attempt)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    def _handle_proxied(self, request: httpx.Request, proxy: str) -> httpx.Response:
        try:
            self._policy.addresses(request.url)
        except PrivateAddress:
            raise
        except httpx.ConnectError:  # only the proxy can resolve it
            pass
        transport = self._proxies.get(proxy)
        if transport is None:
            transport = self._proxies[proxy] = httpx.HTTPTransport(proxy=proxy, limits=_LIMITS)
        return transport.handle_request(request)

    def close(self) -> None:
        for transport in (self._direct, *self._proxies.values()):
            transport.close()


class AsyncPublicTransport(httpx.AsyncBaseTransport):
    """A transport to public addresses; ``is_exempt`` selects URLs whose host may be private."""

    def __init__(self, is_exempt: Callable[[httpx.URL], bool], resolver: Resolver = resolve) -> None:
        self._policy = _Policy(is_exempt, resolver)
        self._direct = httpx.AsyncHTTPTransport(limits=_LIMITS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        addresses = await asyncio.to_thread(self._policy.addresses, request.url)
        failure: httpx.TransportError = PrivateAddress(request.url.host)
        for attempt in _requests(request, addresses):
            try:
                return await self._direct.handle_async_request(attempt)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        await self._direct.aclose()


def _environment_proxy(url: httpx.URL) -> str | None:
    """Return the URL of the proxy that the environment names for a URL; None for a direct connection."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
