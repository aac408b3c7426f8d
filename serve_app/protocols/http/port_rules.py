"""The rules of an HTTP port that do not depend on a request's protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serve_app.errors import RelayError
from serve_app.net.request_origin import NO_PROXIES, CrossSitePolicy, TrustedProxies
from serve_app.protocols.http.exchange import HttpExchange


@dataclass(frozen=True)
class PortRules:
    """The pages that may send requests, and the proxies whose address of the client counts."""

    cross_site: CrossSitePolicy
    proxies: TrustedProxies = NO_PROXIES
    on_error: Callable[[HttpExchange, RelayError], None] | None = None
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # paths, perhaps after a method, and those that are served in their place

    def find_alias(self, method: str, path: str) -> str | None:
        """Return the path that is served in place of a request's; None where that is its own."""
        aliases = self.aliases
        return (aliases.get(path) or aliases.get(f"{method} {path}")) if aliases else None
