"""Archives from object stores, the Hugging Face hub and OCI registries.

S3, Google Cloud Storage and the hub are read through their fsspec file systems, Azure Blob Storage and
registries over HTTP.

``store.storage_options`` is passed to a file system unchanged, by scheme. Other settings come from each
library's own sources (``AWS_…``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``HF_TOKEN``, and their files).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from handlers import tasks
from serve_app.domain.urls import redact_url
from serve_app.errors import ConfigurationError, DownloadFailed, InvalidArchive
from serve_app.model_store import azure_blobs, oci
from serve_app.model_store.atomic_dir import remove_tree
from serve_app.model_store.download import IDLE_TIMEOUT, Deadline, DownloadProgress, OnProgress, too_deep
from serve_app.net.egress import PrivateAddress
from serve_app.settings import MIB, ModelStoreSettings

EXTRAS = {"s3": "s3", "gs": "gcs", "hf": "hf"}  # scheme -> the extra with its file system
SCHEMES = (*EXTRAS, "az", "oci")  # az and oci need no extra
ARCHIVES = (".mar", ".tar.gz", ".tgz", ".zip")

MAX_LISTED = 250_000  # files of a folder that list_files returns

_MAX_KEYS = 1000  # of a page of S3's listings
_CHUNK = 16 * MIB  # per request: fewer requests are faster, more of them report progress more often
_ACCESS_HINTS = {
    "s3": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and what they may read, "
    "or set store.storage_options.s3.anon for a public bucket",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS and what they may read, "
    "or set store.storage_options.gs.token to anon for a public bucket",
    "hf": "check HF_TOKEN and what it may read",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "store.storage_options.az",
    "oci": "log in with docker login, or set username and password in store.storage_options.oci by registry",
}


class ObjectAddress(NamedTuple):
    """An address in an object store; ``path`` is bucket and key, or owner, name and file."""

    scheme: str
    path: str
    region: str | None = None  # of an https URL of S3; empty where it has none


def parse_address(url: str) -> ObjectAddress:
    """Return the address of ``s3://bucket/key``, ``gs://bucket/object``, ``az://container/blob``,
    ``hf://owner/name[@revision][/file]``, ``oci://registry/repository[:tag]``.
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
    by_operator: bool = False,
) -> Path:
    """Download the archive, or the model's directory, at an address to the directory ``into``.

    A folder with ``MAR-INF``, of a Hugging Face model or of MLflow, is a model's directory. Of a folder with
    a single archive the archive is downloaded. ``by_operator``: the URL is one of the settings, and a
    registry may have any address. Raises DownloadFailed, and leaves nothing behind.
    """
    scheme, url = where.scheme, redact_url(url)  # it is only shown from here on
    _check_installed(scheme, url)
    folder = into / "objects"
    folder.mkdir()
    transfer = DownloadProgress(url, settings, progress)
    deadline = transfer.deadline
    try:
        with deadline:
            if scheme == "oci":
                return _download_artifact(where.path, url, folder, transfer, settings, by_operator)

            def call() -> Path:
                with _open_file_system(where, settings, deadline) as (system, path):
                    return _download(system, scheme, path, url, folder, transfer, settings)

            return deadline.run(call) if scheme in EXTRAS else call()
    except BaseException as error:  # each library has its own error classes
        remove_tree(folder)
        if isinstance(error, DownloadFailed | InvalidArchive) or not isinstance(error, Exception):
            raise
        raise DownloadFailed(url, deadline.problem if deadline.is_over else _explain(scheme, error)) from None


def list_files(
    url: str, settings: ModelStoreSettings, describe: Callable[[Mapping[str, Any]], str]
) -> dict[str, str]:
    """Return the files below a folder by their paths in it, each with what ``describe`` returns of it.

    Raises DownloadFailed, also for more than ``MAX_LISTED`` files and after ``download_timeout``.
    """
    where, shown = parse_address(url), redact_url(url)
    _check_installed(where.scheme, shown)
    if where.scheme == "oci":
        raise DownloadFailed(shown, "oci:// is one model and no folder; use an object store")
    deadline = Deadline(settings)

    def call() -> tuple[str, dict[str, dict[str, Any]]]:
        with _open_file_system(where, settings, deadline) as (system, folder):
            return folder, _find(system, where.scheme, folder, MAX_LISTED)

    try:
        with deadline:
            folder, found = deadline.run(call) if where.scheme in EXTRAS else call()
    except Exception as error:  # each library has its own error classes
        reason = deadline.problem if deadline.is_over else _explain(where.scheme, error)
        raise DownloadFailed(shown, reason) from None
    prefix = f"{folder}/"
    paths = {path.lstrip("/"): details for path, details in found.items()}
    return {
        path.removeprefix(prefix): describe(details)
        for path, details in paths.items()
        if path.startswith(prefix)
    }


def _check_installed(scheme: str, url: str) -> None:
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES if scheme != "oci")
        raise DownloadFailed(url, f"{scheme}:// is no object store; use {known} or a folder")
    if scheme in EXTRAS and not is_installed(scheme):
        remedy = f"pip install torchrelay[{EXTRAS[scheme]}]"
        raise DownloadFailed(url, f"{scheme}:// needs a package that is not installed here; {remedy}")


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


def _idle_timeout(settings: ModelStoreSettings) -> float:
    return max(1.0, min(IDLE_TIMEOUT, settings.download_timeout))


@contextlib.contextmanager
def _open_file_system(
    where: ObjectAddress, settings: ModelStoreSettings, deadline: Deadline
) -> Iterator[tuple[Any, str]]:
    """Yield the file system of an address, and the path in it."""
    if where.scheme != "az":
        yield _file_system(where, settings), where.path
        return
    account, path = azure_blobs.read_account(settings.storage_options.get("az", {})).locate(where.path)
    with contextlib.closing(azure_blobs.AzureBlobs(account, _idle_timeout(settings), deadline)) as system:
        yield system, path


def _download_artifact(
    text: str,
    url: str,
    folder: Path,
    transfer: DownloadProgress,
    settings: ModelStoreSettings,
    by_operator: bool,
) -> Path:
    """Download the files of an artifact in a registry, or the model in an image's layers."""
    from serve_app.model_store.cache import unpack_image  # late: the cache imports the sources

    reference = oci.OciReference.parse(text)
    access = oci.RegistryAccess.read(reference.host, settings.storage_options.get("oci", {}))
    artifact = oci.OciArtifact(
        reference, access, _idle_timeout(settings), transfer.deadline, settings.allowed_urls, by_operator
    )
    with contextlib.closing(artifact):
        if not artifact.is_image:
            return _download(artifact, "oci", reference.path, url, folder, transfer, settings)
        transfer.start(sum(layer["size"] for layer in artifact.layers))
        layers = []
        for number, layer in enumerate(artifact.layers):
            layers.append(folder / f"layer-{number}")
            with artifact.open_layer(layer) as source, layers[-1].open("wb") as target:
                while chunk := source.read(_CHUNK):
                    transfer.write(target, chunk)
    model = unpack_image(layers, url, folder / _name(reference.path), settings)
    for path in layers:
        path.unlink()
    names = [path.name for path in model.iterdir() if path.name.lower().endswith(ARCHIVES)]
    return model / names[0] if len(names) == 1 and not tasks.is_model_folder(os.listdir(model)) else model


def _file_system(where: ObjectAddress, settings: ModelStoreSettings) -> Any:
    import fsspec

    options = file_system_options(where.scheme, settings, _idle_timeout(settings))
    if where.region is not None:  # the URL itself has the bucket's region
        client_options = {"region_name": where.region} if where.region else {}
        options |= {
            "endpoint_url": None,
            "client_kwargs": {**options.get("client_kwargs", {}), **client_options},
        }
    system = fsspec.filesystem(where.scheme, **options)
    if where.scheme == "hf":
        import huggingface_hub

        # Its client waits for ever by default, and is one for the whole process.
        huggingface_hub.get_session().timeout = _idle_timeout(settings)
    if where.scheme == "s3":
        system.retries = 3  # besides botocore's; the default of five would take minutes for a dead server
        system.s3.meta.events.register("provide-client-params.s3", _limit_page)
    return system


def _limit_page(params: dict[str, Any], **_: Any) -> None:
    """Limit the size of a listing's page: s3fs requests twice its limit, which some S3 servers refuse."""
    if "MaxKeys" in params:
        params["MaxKeys"] = min(params["MaxKeys"], _MAX_KEYS)


def _download(
    system: Any,
    scheme: str,
    path: str,
    url: str,
    folder: Path,
    transfer: DownloadProgress,
    settings: ModelStoreSettings,
) -> Path:
    info = system.info(path)
    if info["type"] != "directory":
        transfer.start(info.get("size"))
        return _copy(system, info["name"], folder / _name(path), transfer)
    root = info["name"].rstrip("/")
    found = _find(system, scheme, root, settings.max_files)
    files = {file.removeprefix(f"{root}/"): details for file, details in found.items()}
    if tasks.is_model_folder(files) and not any(file.startswith("MAR-INF/") for file in files):
        files = {file: files[file] for file in tasks.required_files(files)}
    elif "MLmodel" not in files and not any(file.startswith("MAR-INF/") for file in files):
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


def _find(system: Any, scheme: str, root: str, limit: int) -> dict[str, dict[str, Any]]:
    """Return the files below a folder. Raises ValueError where they are more than ``limit``.

    ``find`` of a library would keep a whole bucket in memory.
    """
    if scheme == "s3":
        found = system.find(root, detail=True, max_items=limit + 1)
    elif scheme == "gs":
        found = _find_in_gcs(system, root, limit + 1)
    elif scheme == "hf":
        found = {}
        for _, _, files in system.walk(root, detail=True, on_error="raise"):
            found |= {details["name"]: details for details in files.values()}
            if len(found) > limit:
                break
    else:
        found = system.find(root, limit)
    if len(found) > limit:
        raise ValueError(f"{root} has more than {limit:,} files; name a folder with fewer")
    return found


def _find_in_gcs(system: Any, root: str, max_results: int) -> dict[str, dict[str, Any]]:
    try:
        entries = system.ls(root, detail=True, delimiter="", max_results=max_results)
    except FileNotFoundError:
        if "/" not in root:  # there is no such bucket
            raise
        return {}
    return {entry["name"]: entry for entry in entries if entry["type"] != "directory"}


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
    if isinstance(error, PrivateAddress):
        return f"{message}; store.allowed_urls can allow it"
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket, repository or object: {message}"
    if is_access_denied(error):
        return f"access was refused: {message}; {_ACCESS_HINTS[scheme]}"
    if type(error) in (ValueError, ConfigurationError):  # ours, whose messages are whole
        return message
    return f"{type(error).__name__}: {message}"


def is_access_denied(error: Exception) -> bool:
    """Return whether a file system refused access, by its error's class, status or message."""
    denied = isinstance(error, PermissionError) or _status(error) in (401, 403)
    return denied or re.search("credentials|forbidden", str(error), re.IGNORECASE) is not None


def _status(error: Exception) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    return int(str(code)) if str(code).isdecimal() else None
