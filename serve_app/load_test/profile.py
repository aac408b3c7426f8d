"""The request, the profile and the result of a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class LoadRequest:
    """The request that is sent repeatedly."""

    url: str
    method: str = "POST"
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[bytes], bool] | None = None  # of every body; False counts as the error "body"
    bodies: Sequence[bytes] = ()  # sent in turn, in place of ``body``

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not an http or https URL with a host.")
        if self.method == "HEAD":
            raise ValueError("HEAD cannot be measured: its responses declare a body that is not sent.")

    def wires(self) -> list[bytes]:
        """Return the encoded request with each of its bodies."""
        return [self._wire(body) for body in self.bodies or (self.body,)]

    def _wire(self, body: bytes) -> bytes:
        parts = urlsplit(self.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": parts.netloc.rpartition("@")[2], **self.headers}
        if body or self.method not in ("GET", "DELETE"):
            headers |= {"Content-Type": self.content_type, "Content-Length": str(len(body))}
        lines = [f"{self.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@dataclass(frozen=True)
class LoadProfile:
    """The load: connections, rate and duration; the first limit that is reached ends the run."""

    connections: int = 1  # clients of a closed loop; the most connections of an open one
    rate: float | None = None  # requests per second; None is a closed loop
    seconds: float | None = 10.0
    requests: int | None = None
    warmup: float = 1.0  # seconds of the same load before, which are not counted
    timeout: float = 10.0  # seconds for one request, from when it was sent or joined those that wait
    limit: float | None = None  # seconds; answers within it are the goodput
    seed: int = 0  # of the arrivals

    def __post_init__(self) -> None:
        if self.seconds is None and self.requests is None:
            raise ValueError("A load needs an end: give seconds, requests, or both.")
        if self.connections < 1 or (self.rate is not None and not 0 < self.rate < math.inf):
            raise ValueError("A load needs at least one connection, and a rate above 0 where it has one.")


@dataclass(frozen=True)
class LoadResult:
    """The result of a load. Latencies are seconds of successful responses; all others are errors.

    ``requests + failed`` are the requests that began while it was measured, late answers included (and
    what hung since the warm-up, as the error "unanswered"). ``completed`` and ``within`` count good
    answers that came in the measured time, whenever they began, so a throughput has no edge.

    Kinds of errors: "status 503", "connect", "disconnect", "timeout", "protocol" (no HTTP), "body" (the
    check failed), "unanswered".
    """

    engine: str
    connections: int
    seconds: float
    requests: int
    completed: int
    p50: float
    p90: float
    p99: float
    max: float
    errors: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None
    limit: float | None = None
    within: int | None = None  # of completed, how many took no longer than the limit
    mean: float = math.nan  # of the latencies, where all of them are known
    lag: float = 0.0  # p99 of how late the generator itself sent in an open loop, with a connection free

    @property
    def throughput(self) -> float:
        """Return successful responses per second."""
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Return successful responses within the limit per second; None without a limit."""
        return None if self.within is None else self.within / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        return sum(self.errors.values())
