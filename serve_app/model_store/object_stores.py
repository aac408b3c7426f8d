"""Archives from S3, Google Cloud Storage and the Hugging Face hub, each through its fsspec file system.

``store.storage_options`` is passed to the file system unchanged, by scheme. Other settings come from each
library's own sources (``AWS_…``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``HF_TOKEN``, and their files).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from handlers import tasks
from serve_app.domain.urls import redact_url
from serve_app.errors import DownloadFailed
from serve_app.model_store.atomic_dir import remove_tree
from serve_app.model_store.download import IDLE_TIMEOUT, DownloadProgress, OnProgress, too_deep
from serve_app.settings import MIB, ModelStoreSettings

EXTRAS = {"s3": "s3", "gs": "gcs", "hf": "hf"}  # scheme -> the extra with its file system
ARCHIVES = (".mar", ".tar.gz", ".tgz", ".zip")

_CHUNK = 16 * MIB  # per request: fewer requests are faster, more of them report progress more often
_ACCESS_HINTS = {
    "s3": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read, "
    "or set store.storage_options.s3.anon for a public bucket",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS and what they may read, "
    "or set store.storage_options.gs.token to anon for a public bucket",
    "hf": "check HF_TOKEN and what it may read",
}


class ObjectAddress(NamedTuple):
    """An address in an object store; ``path`` is bucket and key, or owner, name and file."""

    scheme: str
    path: str
    region: str | None = None  # of an https URL of S3; empty where it has none


def parse_address(url: str) -> ObjectAddress:
    """Return the address of ``s3://bucket/key``, ``gs://bucket/object``,
    ``hf://owner/name[@revision][/file]``.
    """
    scheme, _, path = url.partition("://")
    return ObjectAddress(scheme, path.strip("/"))


_S3_HOST = re.compile(
    r"(?:(?P<bucket>.+)\.)?s3(?:[.-](?:dualstack\.)?(?P<region>[a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?"
)


def s3_address(url: str) -> ObjectAddress | None:
    """Return the address of an unsigned https URL of Amazon S3; None for any other URL."""
    parts = urlsplit(url)
    host = _S3_HOST.fullmatch(parts.hostname or "")
    if parts.scheme != "https" or parts.query or host is None:
        return None
    path = unquote(parts.path).strip("/")
    return ObjectAddress("s3", f"{host['bucket']}/{path}" if host["bucket"] else path, host["region"] or "")


def is_installed(scheme: str) -> bool:
    import fsspec  # late, here and below: replicas do not need it

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        return False
    return True


def download(
    where: ObjectAddress,
    url: str,
    into: Path,
    settings: ModelStoreSettings,
    progress: OnProgress | None = None,
) -> Path:
    """Download the archive, or the model's directory, at an address to the directory ``into``.

    A folder with ``MAR-INF``, or of a Hugging Face model, is a model's directory. Of a folder with a single
    archive the archive is downloaded. Raises DownloadFailed, and leaves nothing behind.
    """
    scheme, url = where.scheme, redact_url(url)  # it is only shown from here on
    if not is_installed(scheme):
        remedy = f"pip install torchrelay[{EXTRAS[scheme]}]"
        raise DownloadFailed(url, f"{scheme}:// needs a package that is not installed here; {remedy}")
    folder = into / "objects"
    folder.mkdir()
    try:
        system = _file_system(where, settings)
        return _download(system, where.path, url, folder, DownloadProgress(url, settings, progress), settings)
    except BaseException as error:  # each library has its own error classes
        remove_tree(folder)
        if isinstance(error, DownloadFailed) or not isinstance(error, Exception):
            raise
        raise DownloadFailed(url, _explain(scheme, error)) from None


def file_system_options(scheme: str, settings: ModelStoreSettings, idle_timeout: float) -> dict[str, Any]:
    """Return the options of a scheme's file system.

    ``idle_timeout``: seconds without a byte, after which a request to S3 fails.
    """
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        retries = {"total_max_attempts": 2}
        options["config_kwargs"] = {
            "connect_timeout": idle_timeout,
            "read_timeout": idle_timeout,
            "retries": retries,
        }
    elif scheme == "hf" and os.environ.get("HF_ENDPOINT"):
        options["endpoint"] = os.environ["HF_ENDPOINT"]
    return options | settings.storage_options.get(scheme, {})


def _file_system(where: ObjectAddress, settings: ModelStoreSettings) -> Any:
    import fsspec

    options = file_system_options(
        where.scheme, settings, max(1.0, min(IDLE_TIMEOUT, settings.download_timeout))
    )
    if where.region is not None:  # the URL itself has the bucket's region
        client_options = {"region_name": where.region} if where.region else {}
        options |= {
            "endpoint_url": None,
            "client_kwargs": {**options.get("client_kwargs", {}), **client_options},
        }
    system = fsspec.filesystem(where.scheme, **options)
    if where.scheme == "s3":
        system.retries = 3  # besides botocore's; the default of five would take minutes for a dead server
    return system


def _download(
    system: Any, path: str, url: str, folder: Path, transfer: DownloadProgress, settings: ModelStoreSettings
) -> Path:
    info = system.info(path)
    if info["type"] != "directory":
        transfer.start(info.get("size"))
        return _copy(system, info["name"], folder / _name(path), transfer)
    root = info["name"].rstrip("/")
    files = {
        file.removeprefix(f"{root}/"): details for file, details in system.find(root, detail=True).items()
    }
    if tasks.is_model_folder(files) and not any(file.startswith("MAR-INF/") for file in files):
        files = {file: files[file] for file in tasks.required_files(files)}
    elif not any(file.startswith("MAR-INF/") for file in files):
        archives = [file for file in files if "/" not in file and file.lower().endswith(ARCHIVES)]
        if len(archives) != 1:
            nothing = "it holds neither MAR-INF nor an archive, nor a config.json with weights"
            what = f"it holds {len(archives)} archives" if archives else nothing
            raise DownloadFailed(url, f"{what}; specify the file: {url.rstrip('/')}/model.mar")
        files = {archives[0]: files[archives[0]]}
        transfer.start(files[archives[0]].get("size"))
        return _copy(system, f"{root}/{archives[0]}", folder / _name(archives[0]), transfer)
    if len(files) > settings.max_files:
        raise DownloadFailed(url, f"holds more than max_files ({settings.max_files}) files")
    transfer.start(sum(details.get("size") or 0 for details in files.values()))
    model = folder / _name(path)
    for file in files:
        inner = PurePosixPath(file)
        if inner.is_absolute() or ".." in inner.parts:
            raise DownloadFailed(url, f"the file {file!r} leaves the model's directory")
        if len(inner.parts) - 1 > settings.max_depth:
            raise DownloadFailed(url, too_deep(settings))
        (model / inner).parent.mkdir(parents=True, exist_ok=True)
        _copy(system, f"{root}/{file}", model / inner, transfer)
    return model


def _copy(system: Any, path: str, file: Path, transfer: DownloadProgress) -> Path:
    with system.open(path, "rb", cache_type="none") as source, file.open("wb") as target:
        while chunk := source.read(_CHUNK):
            transfer.write(target, chunk)
    return file


def _name(path: str) -> str:
    return safe_name(path.rstrip("/").rpartition("/")[2].partition("@")[0])


def safe_name(name: str) -> str:
    """Return ``name`` as a file name of safe characters."""
    return re.sub(r"[^\w.-]", "_", name)[-128:].lstrip(".") or "archive"


def _explain(scheme: str, error: Exception) -> str:
    message = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket, repository or object: {message}"
    if is_access_denied(error):
        return f"access was refused: {message}; {_ACCESS_HINTS[scheme]}"
    return f"{type(error).__name__}: {message}"


def is_access_denied(error: Exception) -> bool:
    """Return whether a file system refused access, by its error's class, status or message."""
    denied = isinstance(error, PermissionError) or _status(error) in (401, 403)
    return denied or re.search("credentials|forbidden", str(error), re.IGNORECASE) is not None


def _status(error: Exception) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    return int(str(code)) if str(code).isdecimal() else None
