"""Archives from S3, Google Cloud Storage and the Hugging Face hub, each through its fsspec file system.

``store.storage_options`` goes to the file system as it stands, by scheme; what it does not say comes
from the place where each of them looks by itself (``AWS_…``, ``GOOGLE_APPLICATION_CREDENTIALS``,
``HF_TOKEN``, and their files).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from handlers import tasks
from serve_app.errors import DownloadFailed
from serve_app.settings import MIB, StoreSettings
from serve_app.store.transfer import QUIET, OnProgress, Transfer

EXTRAS = {"s3": "s3", "gs": "gcs", "hf": "hf"}  # scheme -> the extra that brings its file system
ARCHIVES = (".mar", ".tar.gz", ".tgz", ".zip")

_PIECE = 16 * MIB  # a request each: fewer of them are faster, more of them tell more often
_REFUSED = {
    "s3": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read, "
    "or set store.storage_options.s3.anon for a public bucket",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS and what they may read, "
    "or set store.storage_options.gs.token to anon for a public bucket",
    "hf": "check HF_TOKEN and what it may read",
}


class Address(NamedTuple):
    """``path`` is the file system's: bucket and key, or owner, name and file."""

    scheme: str
    path: str
    region: str | None = None  # of an https URL of S3's; empty where it names none


def address(url: str) -> Address:
    """Of ``s3://bucket/key``, ``gs://bucket/object``, ``hf://owner/name[@revision][/file]``."""
    scheme, _, path = url.partition("://")
    return Address(scheme, path.strip("/"))


_S3_HOST = re.compile(
    r"(?:(?P<bucket>.+)\.)?s3(?:[.-](?:dualstack\.)?(?P<region>[a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?"
)


def s3_address(url: str) -> Address | None:
    """Of an https URL of Amazon S3's that carries no signature of its own; None for any other URL."""
    parts = urlsplit(url)
    host = _S3_HOST.fullmatch(parts.hostname or "")
    if parts.scheme != "https" or parts.query or host is None:
        return None
    path = unquote(parts.path).strip("/")
    return Address("s3", f"{host['bucket']}/{path}" if host["bucket"] else path, host["region"] or "")


def installed(scheme: str) -> bool:
    import fsspec  # late, here and below: replicas never need it

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        return False
    return True


def bring(where: Address, url: str, into: Path, settings: StoreSettings, progress: OnProgress | None = None) -> Path:
    """The archive, or the model's directory, that lies at an address, brought into the directory ``into``.

    A folder is a model's directory when it holds ``MAR-INF`` or is a Hugging Face model's, and stands for its
    archive when it holds one archive and no other. Raises DownloadFailed, and leaves nothing behind then.
    """
    scheme = where.scheme
    if not installed(scheme):
        cure = f"pip install torchrelay[{EXTRAS[scheme]}]"
        raise DownloadFailed(url, f"{scheme}:// needs a package that is not installed here; {cure}")
    place = into / "objects"
    place.mkdir()
    try:
        system = _file_system(where, settings)
        return _bring(system, where.path, url, place, Transfer(url, settings, progress), settings)
    except DownloadFailed:
        shutil.rmtree(place, ignore_errors=True)
        raise
    except Exception as error:  # each of these libraries has a tree of its own
        shutil.rmtree(place, ignore_errors=True)
        raise DownloadFailed(url, _explain(scheme, error)) from None
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def options_of(scheme: str, settings: StoreSettings, quiet: float) -> dict[str, Any]:
    """What a scheme's file system is made with. ``quiet``: seconds without a byte, after which S3 counts as gone."""
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        retries = {"total_max_attempts": 2}
        options["config_kwargs"] = {"connect_timeout": quiet, "read_timeout": quiet, "retries": retries}
    elif scheme == "hf" and os.environ.get("HF_ENDPOINT"):
        options["endpoint"] = os.environ["HF_ENDPOINT"]
    return options | settings.storage_options.get(scheme, {})


def _file_system(where: Address, settings: StoreSettings) -> Any:
    import fsspec

    options = options_of(where.scheme, settings, max(1.0, min(QUIET, settings.download_timeout)))
    if where.region is not None:  # the URL itself says where the bucket is
        own = {"region_name": where.region} if where.region else {}
        options |= {"endpoint_url": None, "client_kwargs": {**options.get("client_kwargs", {}), **own}}
    system = fsspec.filesystem(where.scheme, **options)
    if where.scheme == "s3":
        system.retries = 3  # on top of botocore's; its own five make a dead server last for minutes
    return system


def _bring(system: Any, path: str, url: str, place: Path, transfer: Transfer, settings: StoreSettings) -> Path:
    found = system.info(path)
    if found["type"] != "directory":
        transfer.begin(found.get("size"))
        return _copy(system, found["name"], place / _name(path), transfer)
    home = found["name"].rstrip("/")
    files = {file.removeprefix(f"{home}/"): facts for file, facts in system.find(home, detail=True).items()}
    if tasks.is_folder(files) and not any(file.startswith("MAR-INF/") for file in files):
        files = {file: files[file] for file in tasks.needed(files)}
    elif not any(file.startswith("MAR-INF/") for file in files):
        archives = [file for file in files if "/" not in file and file.lower().endswith(ARCHIVES)]
        if len(archives) != 1:
            nothing = "it holds neither MAR-INF nor an archive, nor a config.json with weights"
            what = f"it holds {len(archives)} archives" if archives else nothing
            raise DownloadFailed(url, f"{what}; name the file: {url.rstrip('/')}/model.mar")
        files = {archives[0]: files[archives[0]]}
        transfer.begin(files[archives[0]].get("size"))
        return _copy(system, f"{home}/{archives[0]}", place / _name(archives[0]), transfer)
    if len(files) > settings.max_files:
        raise DownloadFailed(url, f"holds more than max_files ({settings.max_files}) files")
    transfer.begin(sum(facts.get("size") or 0 for facts in files.values()))
    model = place / _name(path)
    for file in files:
        inner = PurePosixPath(file)
        if inner.is_absolute() or ".." in inner.parts:
            raise DownloadFailed(url, f"the file {file!r} leaves the model's directory")
        (model / inner).parent.mkdir(parents=True, exist_ok=True)
        _copy(system, f"{home}/{file}", model / inner, transfer)
    return model


def _copy(system: Any, path: str, file: Path, transfer: Transfer) -> Path:
    with system.open(path, "rb", cache_type="none") as source, file.open("wb") as target:
        while piece := source.read(_PIECE):
            transfer.write(target, piece)
    return file


def _name(path: str) -> str:
    last = path.rstrip("/").rpartition("/")[2].partition("@")[0]
    return re.sub(r"[^\w.-]", "_", last)[-128:].lstrip(".") or "archive"


def _explain(scheme: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket, repository or object: {said}"
    if was_refused(error):
        return f"access was refused: {said}; {_REFUSED[scheme]}"
    return f"{type(error).__name__}: {said}"


def was_refused(error: Exception) -> bool:
    """Whether a file system refused access, by its error's kind, its status or its words."""
    refused = isinstance(error, PermissionError) or _status(error) in (401, 403)
    return refused or re.search("credentials|forbidden", str(error), re.IGNORECASE) is not None


def _status(error: Exception) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    return int(code) if str(code).isdecimal() else None
