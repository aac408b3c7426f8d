"""Archives from web servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import httpx

from serve_app.errors import DownloadFailed
from serve_app.settings import MIB, StoreSettings
from serve_app.store.transfer import QUIET, OnProgress, Transfer


def download(
    url: str,
    file: Path,
    settings: StoreSettings,
    progress: OnProgress | None = None,
    check: Callable[[str], None] | None = None,
) -> Path:
    """Bring an HTTP archive to ``file``; nothing stays there when that fails. Raises DownloadFailed.

    ``check`` is asked about every redirect, and raises where it is not allowed.
    """
    transfer = Transfer(url, settings, progress)
    hops = itertools.count()

    def hop(request: httpx.Request) -> None:
        if next(hops) and check is not None:  # the first is the URL itself, as the caller wrote it
            check(str(request.url))

    try:
        with (
            httpx.Client(
                follow_redirects=True,
                timeout=min(QUIET, settings.download_timeout),
                headers={"accept-encoding": "identity"},  # packed already: an encoding would only blur the length
                event_hooks={"request": [hop]},
            ) as client,
            client.stream("GET", url) as response,
            file.open("wb") as target,
        ):
            if response.status_code != 200:
                raise DownloadFailed(url, f"the server answered {response.status_code} {response.reason_phrase}")
            length = response.headers.get("content-length", "")
            transfer.begin(int(length) if length.isdecimal() else None)
            for piece in response.iter_raw(MIB):
                transfer.write(target, piece)
        return file
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        file.unlink(missing_ok=True)
        raise DownloadFailed(url, f"{type(error).__name__}: {error}") from None
    except BaseException:
        file.unlink(missing_ok=True)
        raise
