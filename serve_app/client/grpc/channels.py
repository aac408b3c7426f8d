"""Addresses, certificates and channels of a server's gRPC ports."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

# gRPC's names: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
_OPTIONS = {
    # The server limits the size of messages, and its errors name the limit.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # Each client has its own connections, which are closed with it.
    "grpc.use_local_subchannel_pool": 1,
    # A retry must try to connect again.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # Only the client's own rules retry calls; gRPC itself repeats what no server's method has received.
    "grpc.service_config_disable_resolution": 1,
    # A server that disappears silently is detected after a minute and a half.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 30_000,
}


class GrpcAddress:
    """An address of a gRPC port.

    ``HOST:PORT``, ``http://HOST:PORT``, ``https://HOST:PORT`` for TLS, or another target of gRPC
    (``unix:PATH``). Raises ValueError.
    """

    def __init__(self, address: str) -> None:
        scheme, separator, _ = address.partition("://")
        self.secure = bool(separator) and scheme.lower() == "https"
        self.target = address
        if separator and scheme.lower() in ("http", "https"):
            parts = urlsplit(address)
            if not parts.netloc or parts.path not in ("", "/"):
                raise ValueError(f"{address!r} is no address of a gRPC port; write it as https://HOST:PORT.")
            self.target = parts.netloc


class TlsFiles:
    """The client's TLS configuration as PEM files: trusted roots (default: gRPC's), its own certificate."""

    def __init__(self, roots: Path | None, chain: Path | None, key: Path | None) -> None:
        self._roots = roots
        self._chain = chain
        self._key = key

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the configuration for gRPC."""
        return grpc.ssl_channel_credentials(
            *(path and Path(path).read_bytes() for path in (self._roots, self._key, self._chain))
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Return the configuration for HTTP."""
        context = ssl.create_default_context(cafile=self._roots)
        if self._chain is not None:
            context.load_cert_chain(self._chain, self._key)
        return context


def create_channel(
    grpc_module: Any, address: GrpcAddress, tls_files: TlsFiles, options: Mapping[str, Any]
) -> Any:
    """Create a channel of ``grpc`` or ``grpc.aio``; it connects with its first call."""
    all_options = list({**_OPTIONS, **options}.items())
    if address.secure:
        return grpc_module.secure_channel(
            address.target, tls_files.channel_credentials(), options=all_options
        )
    return grpc_module.insecure_channel(address.target, options=all_options)
