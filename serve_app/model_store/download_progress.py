"""Bytes on their way here: counted, timed and told of while they are written, from whatever source."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import BinaryIO

from serve_app.errors import DownloadFailed
from serve_app.settings import StoreSettings

OnProgress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where known

QUIET = 30.0  # seconds without a byte, after which a source counts as gone


class Transfer:
    """One download, of one file or several; ``total`` is in bytes, None where the source does not say.

    Raises DownloadFailed over ``max_archive_bytes`` and after ``download_timeout``.
    """

    def __init__(self, url: str, settings: StoreSettings, progress: OnProgress | None) -> None:
        self._url = url
        self._settings = settings
        self._progress = progress
        self._until = time.monotonic() + settings.download_timeout
        self._done = 0
        self._total: int | None = None

    def begin(self, total: int | None) -> None:
        """The source has said how much there is; an announced size over the limit ends it here."""
        self._total = total
        self.write(None, b"")

    def write(self, target: BinaryIO | None, piece: bytes) -> None:
        self._done += len(piece)
        limits = self._settings
        if max(self._done, self._total or 0) > limits.max_archive_bytes:
            raise DownloadFailed(self._url, f"larger than max_archive_bytes ({limits.max_archive_bytes})")
        if time.monotonic() > self._until:
            limit = f"download_timeout ({limits.download_timeout:g} s)"
            raise DownloadFailed(self._url, f"not done within {limit}; raise it if the server is slow")
        if target is not None:
            target.write(piece)
        if self._progress:
            self._progress(self._done, self._total)
