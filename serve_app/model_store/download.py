"""Downloads: their progress and limits from any source, and archives from web servers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx

from serve_app.domain.urls import redact_url
from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.net.egress import PrivateAddress
from serve_app.settings import MIB, ModelStoreSettings

OnProgress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where known

IDLE_TIMEOUT = 30.0  # seconds without a byte, after which a download fails


class DownloadProgress:
    """A download of one or several files.

    Raises DownloadFailed beyond ``max_archive_bytes`` and after ``download_timeout``.
    """

    def __init__(self, url: str, settings: ModelStoreSettings, progress: OnProgress | None) -> None:
        self._url = url
        self._settings = settings
        self._progress = progress
        self._deadline = time.monotonic() + settings.download_timeout
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
        if time.monotonic() > self._deadline:
            limit = f"download_timeout ({limits.download_timeout:g} s)"
            raise DownloadFailed(self._url, f"not done within {limit}; raise it if the server is slow")
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
            httpx.Client(
                transport=transport,
                follow_redirects=True,
                timeout=min(IDLE_TIMEOUT, settings.download_timeout),
                # Archives are compressed already, and an encoding would hide the length.
                headers={"accept-encoding": "identity"},
                event_hooks={"request": [check_redirect]},
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
            for chunk in response.iter_raw(MIB):
                transfer.write(target, chunk)
        return file
    except BaseException as error:
        file.unlink(missing_ok=True)
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
