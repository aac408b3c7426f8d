"""Where archives come from: the model store by bare name, ``file://``, ``http(s)://``, a directory's path.

The messages of a refused URL are TorchServe's, for clients that read them.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.settings import MIB, StoreSettings

OnProgress = Callable[[int, "int | None"], None]  # bytes so far, bytes in all where known

_READ_TIMEOUT = 30.0  # seconds without a byte


def fetch(url: str, settings: StoreSettings, model_store: Path, into: Path, progress: OnProgress | None = None) -> Path:
    """The archive file, or the model directory, that ``url`` names, on this machine.

    What is here already is returned where it lies; a download lands in the directory ``into``.
    A bare name is looked up in ``model_store`` and cannot leave it; everything else must match
    one of ``settings.allowed_urls`` in full, an absolute path as its ``file://`` URL.
    Raises ArchiveNotFound and DownloadFailed.
    """
    if not url:
        raise ArchiveNotFound("empty url")
    if ".." in url or ".." in unquote(url):
        raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
    scheme, separator, _ = url.partition("://")
    if not separator:
        here = _in_store(url, model_store)
        if here is None and url.startswith("/"):
            _allow(f"file://{url}", url, settings)
            here = Path(url)
        return _there(here, url)
    _allow(url, url, settings)
    if scheme == "file":
        return _there(file_path(url), url)
    if scheme in ("http", "https"):
        return download(url, into / _file_name(url), settings, progress, check=True)
    raise DownloadFailed(url, f"{scheme}:// is not supported; use file://, http(s):// or a name in the model store")


def file_path(url: str) -> Path | None:
    """The path that a ``file://`` URL names; None where it names another machine's."""
    rest = url[len("file://") :]
    rest = rest[len("localhost") :] if rest.startswith("localhost/") else rest
    return Path(unquote(rest)) if rest.startswith("/") else None


def download(
    url: str, file: Path, settings: StoreSettings, progress: OnProgress | None = None, check: bool = False
) -> Path:
    """Bring an HTTP archive to ``file``; nothing stays there when that fails. Raises DownloadFailed.

    With ``check`` every redirect must match ``allowed_urls`` too, else ArchiveNotFound.
    """
    until = time.monotonic() + settings.download_timeout
    hops = itertools.count()

    def hop(request: httpx.Request) -> None:
        if next(hops) and check:  # the first is the URL itself, as the caller wrote it
            _allow(str(request.url), str(request.url), settings)

    try:
        with (
            httpx.Client(
                follow_redirects=True,
                timeout=min(_READ_TIMEOUT, settings.download_timeout),
                headers={"accept-encoding": "identity"},  # packed already: an encoding would only blur the length
                event_hooks={"request": [hop]},
            ) as client,
            client.stream("GET", url) as response,
            file.open("wb") as target,
        ):
            if response.status_code != 200:
                raise DownloadFailed(url, f"the server answered {response.status_code} {response.reason_phrase}")
            length = response.headers.get("content-length", "")
            total = int(length) if length.isdecimal() else None
            done = 0
            for chunk in itertools.chain([b""], response.iter_raw(MIB)):
                done += len(chunk)
                if max(done, total or 0) > settings.max_archive_bytes:
                    raise DownloadFailed(url, f"larger than max_archive_bytes ({settings.max_archive_bytes})")
                if time.monotonic() > until:
                    limit = f"download_timeout ({settings.download_timeout:g} s)"
                    raise DownloadFailed(url, f"not done within {limit}; raise it if the server is slow")
                target.write(chunk)
                if progress:
                    progress(done, total)
        return file
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        file.unlink(missing_ok=True)
        raise DownloadFailed(url, f"{type(error).__name__}: {error}") from None
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _allow(url: str, given: str, settings: StoreSettings) -> None:
    if not any(re.fullmatch(pattern, url) for pattern in settings.allowed_urls):
        raise ArchiveNotFound(f"Given URL {given} does not match any allowed URL(s)")


def _in_store(name: str, model_store: Path) -> Path | None:
    """The path of ``name`` below the model store; None where it is not below it."""
    store = model_store.absolute()
    path = store / name  # an absolute name replaces the store
    if store not in path.parents:
        return None
    try:
        inside = path.resolve().is_relative_to(store.resolve())
    except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, a NUL
        inside = True  # nothing that can be opened: it will not be found
    if not inside:
        why = "a link that leaves the model store; put the archive itself there"
        raise ArchiveNotFound(f"Model not found at: {name} ({why})")
    return path


def _there(path: Path | None, url: str) -> Path:
    try:
        if path is not None and (path.is_file() or path.is_dir()):
            return path
    except (OSError, ValueError):
        pass
    raise ArchiveNotFound(f"Model not found at: {url}")


def _file_name(url: str) -> str:
    last = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    return re.sub(r"[^\w.-]", "_", last)[-128:].lstrip(".") or "archive"
