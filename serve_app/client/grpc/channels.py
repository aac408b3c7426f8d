"""Where a server's gRPC ports are, and how a connection to one is made."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

# gRPC's own words for them: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
_OPTIONS = {
    # The server has limits, and names them.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # Each client has connections of its own, which end with it.
    "grpc.use_local_subchannel_pool": 1,
    # A further attempt is to find out anew whether somebody listens.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # How often a call is sent is said here alone; what gRPC sends again itself has not reached a server's methods.
    "grpc.service_config_disable_resolution": 1,
    # A server that is gone without a word is missed after a minute and a half.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 30_000,
}


class Address:
    """``HOST:PORT`` or ``http://HOST:PORT``, ``https://HOST:PORT`` where TLS is spoken, or what else gRPC calls a
    target (``unix:PATH``). Raises ValueError.
    """

    def __init__(self, said: str) -> None:
        scheme, found, _ = said.partition("://")
        self.secure = bool(found) and scheme.lower() == "https"
        self.target = said
        if found and scheme.lower() in ("http", "https"):
            parts = urlsplit(said)
            if not parts.netloc or parts.path not in ("", "/"):
                raise ValueError(f"{said!r} is no address of a gRPC port; say it as https://HOST:PORT.")
            self.target = parts.netloc


class Certificates:
    """The client's side of TLS, as files in PEM: whom it trusts, if not those that gRPC brings, and who it is."""

    def __init__(self, roots: Path | None, chain: Path | None, key: Path | None) -> None:
        self._roots = roots
        self._chain = chain
        self._key = key

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            *(f and Path(f).read_bytes() for f in (self._roots, self._key, self._chain))
        )

    def context(self) -> ssl.SSLContext:
        """The same for HTTP."""
        made = ssl.create_default_context(cafile=self._roots)
        if self._chain is not None:
            made.load_cert_chain(self._chain, self._key)
        return made


def channel(kind: Any, address: Address, certificates: Certificates, options: Mapping[str, Any]) -> Any:
    """A channel of ``grpc`` or of ``grpc.aio``, whichever ``kind`` is; it connects when it is first asked."""
    how = list({**_OPTIONS, **options}.items())
    if address.secure:
        return kind.secure_channel(address.target, certificates.credentials(), options=how)
    return kind.insecure_channel(address.target, options=how)
