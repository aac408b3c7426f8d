"""The rules of an HTTP port that do not depend on a request's protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.errors import RelayError
from serve_app.net.request_origin import NO_PROXIES, CrossSitePolicy, TrustedProxies
from serve_app.protocols.http.exchange import HttpExchange


@dataclass(frozen=True)
class PortRules:
    """The pages that may send requests, and the proxies whose address of the client counts."""

    cross_site: CrossSitePolicy
    proxies: TrustedProxies = NO_PROXIES
    on_error: Callable[[HttpExchange, RelayError], None] | None = None
