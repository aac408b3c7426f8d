"""Where archives come from: the model store by bare name, a path, and every scheme of a URL that is served.

The messages of a refused URL are TorchServe's, for clients that read them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.settings import StoreSettings
from serve_app.store import object_stores
from serve_app.store.transfer import OnProgress
from serve_app.store.web import download


def fetch(
    url: str,
    settings: StoreSettings,
    model_store: Path,
    into: Path,
    progress: OnProgress | None = None,
    signed: bool = False,
) -> Path:
    """The archive file, or the model directory, that ``url`` names, on this machine.

    What is here already is returned where it lies; a download lands in the directory ``into``.
    A bare name is looked up in ``model_store`` and cannot leave it; everything else must match
    one of ``settings.allowed_urls`` in full, an absolute path as its ``file://`` URL. ``signed``: an
    https URL of Amazon S3's must be asked for with the credentials that are found here.
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
    if scheme in object_stores.EXTRAS:
        return object_stores.bring(object_stores.address(url), url, into, settings, progress)
    if scheme in ("http", "https"):
        if (bucket := _signed(url, signed)) is not None:
            return object_stores.bring(bucket, url, into, settings, progress)
        return download(url, into / _file_name(url), settings, progress, lambda hop: _allow(hop, hop, settings))
    known = ", ".join(f"{scheme}://" for scheme in ("file", "http(s)", *object_stores.EXTRAS))
    raise DownloadFailed(url, f"{scheme}:// is not supported; use {known} or a name in the model store")


def file_path(url: str) -> Path | None:
    """The path that a ``file://`` URL names; None where it names another machine's."""
    rest = url[len("file://") :]
    rest = rest[len("localhost") :] if rest.startswith("localhost/") else rest
    return Path(unquote(rest)) if rest.startswith("/") else None


def _signed(url: str, must: bool) -> object_stores.Address | None:
    """The address in S3 of an https URL that is to be asked for with credentials."""
    bucket = object_stores.s3_address(url)
    if must and bucket is None:
        raise DownloadFailed(url, "s3_sse_kms is for https://bucket.s3.region.amazonaws.com/key; leave it out here")
    found = all(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    return bucket if must or (found and object_stores.installed("s3")) else None


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
