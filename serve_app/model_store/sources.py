"""Sources of archives: names in the model store, paths, and URLs of all supported schemes.

Without ``store.allowed_urls`` a client's URL reaches public addresses only, and no file. The messages of a
refused URL begin as TorchServe's, for clients that parse them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from serve_app.domain.urls import matches_any, redact_url
from serve_app.errors import ArchiveNotFound, ConfigurationError, DownloadFailed
from serve_app.model_store import object_stores
from serve_app.model_store.download import OnProgress, download
from serve_app.net.egress import PublicTransport
from serve_app.settings import ModelStoreSettings


def fetch(
    url: str,
    settings: ModelStoreSettings,
    model_store: Path,
    into: Path,
    progress: OnProgress | None = None,
    signed: bool = False,
    by_operator: bool = False,
) -> Path:
    """Return the local archive file or model directory of ``url``, downloaded if necessary.

    Local paths are returned unchanged; downloads are written to the directory ``into``. A bare name is looked
    up in ``model_store`` and cannot leave it. Everything else must match one of ``settings.allowed_urls`` in
    full, an absolute path as its ``file://`` URL. Without that setting a file, or an address that is not
    public, is allowed only ``by_operator``, in a URL of the settings. With ``signed``, an https URL of Amazon
    S3 is requested with the credentials of this machine. Raises ArchiveNotFound and DownloadFailed.
    """
    if not url:
        raise ArchiveNotFound("empty url")
    if ".." in url or ".." in unquote(url):
        raise ArchiveNotFound(f"Relative path is not allowed in url: {redact_url(url)}")
    scheme, separator, _ = url.partition("://")
    if not separator:
        path = _in_store(url, model_store)
        if path is None and url.startswith("/"):
            _check_allowed(f"file://{url}", url, settings, by_operator)
            path = Path(url)
        if path is None or not _exists(path):
            raise ArchiveNotFound(f"Model not found at: {redact_url(url)}")
        return path
    _check_allowed(url, url, settings, by_operator)
    try:
        path_of_url = urlsplit(url).path
    except ValueError as error:
        raise DownloadFailed(redact_url(url), f"it is no URL: {error}") from None
    if scheme == "file":
        path = file_path(url)
        if path is None or not _exists(path):
            raise DownloadFailed(redact_url(url), "no such file or directory on the server's machine")
        return path
    if scheme in object_stores.SCHEMES:
        where = object_stores.parse_address(url)
        return object_stores.download(where, url, into, settings, progress, by_operator)
    if scheme in ("http", "https"):
        if (bucket := _signed_address(url, signed)) is not None:
            return object_stores.download(bucket, url, into, settings, progress)
        return download(
            url,
            into / object_stores.safe_name(unquote(path_of_url.rsplit("/", 1)[-1])),
            settings,
            progress,
            lambda redirect: _check_allowed(redirect, redirect, settings, by_operator),
            PublicTransport() if settings.allowed_urls is None and not by_operator else None,
        )
    known = ", ".join(f"{scheme}://" for scheme in ("file", "http(s)", *object_stores.SCHEMES))
    raise DownloadFailed(
        redact_url(url), f"{scheme}:// is not supported; use {known} or a name in the model store"
    )


def list_entries(store: Path) -> list[Path]:
    """Return the files and folders of a model store by name; none where it does not exist.

    Raises ConfigurationError where it cannot be read.
    """
    try:
        return sorted(store.iterdir()) if store.exists() else []
    except NotADirectoryError:
        problem = "it is a file; set store.model_store to a folder of archives"
    except PermissionError:
        user = f"the user {os.getuid()} must read and enter it"
        problem = f"permission denied: {user} (chmod o+rx, or another owner), or control.load_models be none"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}); set store.model_store to another folder"
    raise ConfigurationError(f"model store {store}", problem)


def file_path(url: str) -> Path | None:
    """Return the path of a ``file://`` URL; None where it is on another machine."""
    rest = url[len("file://") :]
    rest = rest[len("localhost") :] if rest.startswith("localhost/") else rest
    return Path(unquote(rest)) if rest.startswith("/") else None


def _signed_address(url: str, required: bool) -> object_stores.ObjectAddress | None:
    """Return the address in S3 of an https URL that must be requested with credentials."""
    bucket = object_stores.s3_address(url)
    if required and bucket is None:
        raise DownloadFailed(
            redact_url(url), "s3_sse_kms is for https://bucket.s3.region.amazonaws.com/key; leave it out here"
        )
    has_credentials = all(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    return bucket if required or (has_credentials and object_stores.is_installed("s3")) else None


def split_digest(url: str) -> tuple[str, str | None]:
    """Return a URL without its ``sha256`` (``?sha256=`` or ``#sha256=``), and that digest or None."""
    address, _, fragment = url.partition("#")
    match = re.fullmatch("sha256=(.*)", fragment)
    if match:
        return address, match[1]
    path, separator, query = url.partition("?")
    parts = query.split("&") if separator else []
    digests = [part.partition("=")[2] for part in parts if part.startswith("sha256=")]
    if not digests:
        return url, None
    others = "&".join(part for part in parts if not part.startswith("sha256="))
    return f"{path}?{others}" if others else path, digests[0]


# The URLs of clients where store.allowed_urls is not set; the transport checks the addresses.
_DEFAULT_URLS = ("http(s)?://.*", *(f"{scheme}://.*" for scheme in object_stores.SCHEMES))


def _check_allowed(url: str, given: str, settings: ModelStoreSettings, by_operator: bool) -> None:
    patterns = settings.allowed_urls
    if patterns is None:
        patterns = (*_DEFAULT_URLS, "file://.*") if by_operator else _DEFAULT_URLS
    if matches_any(patterns, url):
        return
    hint = ""
    if settings.allowed_urls is None and url.startswith("file:"):
        hint = " (a file outside the model store; put it there, or set store.allowed_urls)"
    raise ArchiveNotFound(f"Given URL {redact_url(given)} does not match any allowed URL(s){hint}")


def _in_store(name: str, model_store: Path) -> Path | None:
    """Return the path of ``name`` below the model store; None where it is not below it."""
    store = model_store.absolute()
    path = store / name  # an absolute name replaces the store
    if store not in path.parents:
        return None
    try:
        inside = path.resolve().is_relative_to(store.resolve())
    except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, a NUL
        inside = True  # it cannot be opened, so it will not be found
    if not inside:
        reason = "a link that leaves the model store; put the archive itself there"
        raise ArchiveNotFound(f"Model not found at: {name} ({reason})")
    return path


def _exists(path: Path) -> bool:
    try:
        return path.is_file() or path.is_dir()
    except (OSError, ValueError):
        return False
