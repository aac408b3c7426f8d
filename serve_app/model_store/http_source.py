"""Archives from web servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import httpx

from serve_app.domain.urls import redact_url
from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.model_store.download_progress import IDLE_TIMEOUT, DownloadProgress, OnProgress
from serve_app.net.egress import PrivateAddress
from serve_app.settings import MIB, ModelStoreSettings


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
