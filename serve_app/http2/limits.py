"""The limits of a gRPC port of our own."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.settings import Settings


@dataclass(frozen=True)
class Http2Limits:
    """The limits of a port: sizes in bytes, times in seconds. 0: unlimited.

    Beside ``max_buffered_bytes`` the port receives one message at a time that is larger than a third of them.
    """

    max_message_size: int = 4 << 20
    max_response_size: int = 0
    max_concurrent_calls: int = 10_000
    max_concurrent_streams: int = 128  # of a connection
    max_buffered_bytes: int = 48 << 20  # of all connections
    header_timeout: float = 10.0  # for the handshake, and for each header block
    message_timeout: float = 30.0  # for a request's message, from one part to the next
    stream_idle_timeout: float = 300.0  # between the messages of an open request stream
    send_timeout: float = 30.0  # for a response, from one part to the next
    max_connection_idle: float = 3600.0
    max_connection_age: float = 0.0
    connection_age_grace: float = 0.0
    keepalive_interval: float = 30.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Http2Limits:
        """Return the limits of the inference port."""
        g = settings.grpc
        return cls(
            max_message_size=settings.inference.max_request_size,
            max_response_size=settings.runtime.max_response_size,
            max_concurrent_calls=g.max_concurrent_calls,
            max_concurrent_streams=g.max_concurrent_streams,
            max_buffered_bytes=g.max_buffered_bytes,
            header_timeout=g.header_timeout,
            message_timeout=g.message_timeout,
            stream_idle_timeout=g.stream_idle_timeout,
            send_timeout=g.send_timeout,
            max_connection_idle=g.max_connection_idle,
            max_connection_age=g.max_connection_age,
            connection_age_grace=g.max_connection_age_grace,
        )
