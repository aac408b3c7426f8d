"""Downloads: their progress and limits from any source, and archives from web servers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx

from serve_app.domain.urls import redact_url
from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.net.egress import PrivateAddress
from serve_app.settings import MIB, ModelStoreSettings

OnProgress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where known
Result = TypeVar("Result")

IDLE_TIMEOUT = 30.0  # seconds without a byte, after which a download fails


class Deadline:
    """The end of ``download_timeout``, from which on no request of a download goes on.

    A timeout of httpx limits one operation of a socket. A server that sends a header byte by byte never
    exceeds it, nor one that redirects for ever. So the connections are shut down at the deadline. A TLS
    handshake ends after its own timeout, and the resolution of a name after the resolver's.
    """

    def __init__(self, settings: ModelStoreSettings) -> None:
        self._timeout = settings.download_timeout
        self._end = time.monotonic() + self._timeout
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(self._timeout, self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._sockets.clear()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def problem(self) -> str:
        limit = f"download_timeout ({self._timeout:g} s)"
        return f"not done within {limit}; raise it if the server is slow"

    def watch(self, request: httpx.Request) -> None:
        """Shut down the connection of a request at the deadline; an event hook of an httpx client."""
        request.extensions["trace"] = self._trace

    def run(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call to a library whose requests cannot be watched.

        It runs in a thread of its own, which is left alone at the deadline. Raises TimeoutError.
        """
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="download", daemon=True).start()
        try:
            return future.result(max(0.0, self._end - time.monotonic()))
        except FutureTimeoutError:
            if not future.done():
                self._end = 0.0  # clocks differ by less than they show
            raise

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the socket of a new connection; httpcore calls this at each step of a request."""
        if event.endswith(".started") and self.is_over and "close" not in event:
            raise httpx.ConnectTimeout(self.problem)
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._sockets.append(info["return_value"].get_extra_info("socket"))
            if self.is_over:
                self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            for one in self._sockets:
                # That of SSLSocket would take the TLS state from the thread that reads. The socket may be
                # closed already.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)


class DownloadProgress:
    """A download of one or several files.

    Raises DownloadFailed beyond ``max_archive_bytes`` and after ``download_timeout``.
    """

    def __init__(self, url: str, settings: ModelStoreSettings, progress: OnProgress | None) -> None:
        self._url = url
        self._settings = settings
        self._progress = progress
        self.deadline = Deadline(settings)
        self._received = 0
        self._total: int | None = None

    def start(self, total: int | None) -> None:
        """Set the size in bytes, None if unknown; a declared size over the limit fails at once."""
        self._total = total
        self.write(None, b"")

    def write(self, target: BinaryIO | None, chunk: bytes) -> None:
        self._received += len(chunk)
        limits = self._settings
        if max(self._received, self._total or 0) > limits.max_archive_bytes:
            raise DownloadFailed(self._url, f"larger than max_archive_bytes ({limits.max_archive_bytes})")
        if self.deadline.is_over:
            raise DownloadFailed(self._url, self.deadline.problem)
        if target is not None:
            target.write(chunk)
        if self._progress:
            self._progress(self._received, self._total)


def download(
    url: str,
    file: Path,
    settings: ModelStoreSettings,
    progress: OnProgress | None = None,
    check: Callable[[str], None] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> Path:
    """Download an archive to ``file``, which is removed on failure. Raises DownloadFailed.

    ``check`` is called with every redirect's URL, and raises where it is not allowed. Where ``transport``
    refuses an address, ArchiveNotFound is raised.
    """
    shown = redact_url(url)
    transfer = DownloadProgress(shown, settings, progress)
    requests = itertools.count()

    def check_redirect(request: httpx.Request) -> None:
        if next(requests) and check is not None:  # the first request is that of the URL itself
            check(str(request.url))

    try:
        with (
            transfer.deadline,
            httpx.Client(
                transport=transport,
                follow_redirects=True,
                timeout=min(IDLE_TIMEOUT, settings.download_timeout),
                # Archives are compressed already, and an encoding would hide the length.
                headers={"accept-encoding": "identity"},
                event_hooks={"request": [check_redirect, transfer.deadline.watch]},
            ) as client,
            client.stream("GET", url) as response,
            file.open("wb") as target,
        ):
            if response.status_code != 200:
                raise DownloadFailed(
                    shown, f"the server responded {response.status_code} {response.reason_phrase}"
                )
            length = response.headers.get("content-length", "")
            transfer.start(int(length) if length.isdecimal() else None)
            for chunk in iterate_chunks(response):
                transfer.write(target, chunk)
        return file
    except BaseException as error:
        file.unlink(missing_ok=True)
        if transfer.deadline.is_over and isinstance(error, httpx.HTTPError):
            raise DownloadFailed(shown, transfer.deadline.problem) from None
        if isinstance(error, PrivateAddress):
            reason = f"{error}; store.allowed_urls can allow it"
            raise ArchiveNotFound(f"Given URL {shown} does not match any allowed URL(s) ({reason})") from None
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
            raise DownloadFailed(shown, f"{type(error).__name__}: {error}") from None
        raise


def too_deep(settings: ModelStoreSettings) -> str:
    """Return the problem of an archive with too many directory levels."""
    return (
        f"has more than max_depth ({settings.max_depth}) directory levels; flatten it, or raise "
        "store.max_depth if you trust the archive"
    )


def iterate_chunks(response: httpx.Response) -> Iterator[bytes]:
    """Yield the body of a streamed response in chunks of 1 MiB, and after a second the bytes so far.

    A caller can thus end a body that a server sends byte by byte.
    """
    chunk, start = bytearray(), time.monotonic()
    for part in response.iter_raw():
        chunk += part
        if len(chunk) >= MIB or time.monotonic() - start > 1:
            yield bytes(chunk)
            chunk, start = bytearray(), time.monotonic()
    if chunk:
        yield bytes(chunk)


class ResponseReader:
    """The body of a streamed response as a file; ``check`` is called with each chunk, at the end with b""."""

    def __init__(self, response: httpx.Response, check: Callable[[bytes], None] = lambda chunk: None) -> None:
        self._chunks = iterate_chunks(response)
        self._check = check

    def read(self, size: int = -1) -> bytes:
        """Return the next chunk, empty at the end."""
        chunk = next(self._chunks, b"")
        self._check(chunk)
        return chunk


def read_body(response: httpx.Response, limit: int, timeout: float) -> bytes:
    """Return the body of a streamed response.

    Raises ValueError where it is longer than ``limit`` bytes, or takes longer than ``timeout`` seconds.
    """
    body, deadline = bytearray(), time.monotonic() + timeout
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"the server's response has more than {limit:,} bytes")
        if time.monotonic() > deadline:
            raise ValueError(f"the server's response was not complete within {timeout:g} s")
    return bytes(body)
