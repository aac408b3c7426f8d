"""Progress and limits of a download from any source."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import BinaryIO

from serve_app.errors import DownloadFailed
from serve_app.settings import ModelStoreSettings

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
