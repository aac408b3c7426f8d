"""Models in Azure Blob Storage: a server that verifies signatures and tokens as Azure's does."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from serve_app.errors import ConfigurationError, DownloadFailed
from serve_app.model_store import object_stores
from serve_app.model_store.azure_blobs import BlobAccount
from serve_app.model_store.repository import Repository
from serve_app.model_store.sources import fetch
from serve_app.settings import MIB, ModelStoreSettings, RepositorySettings
from tests.support.http_server import serving
from tests.support.oci_registry import send

pytestmark = pytest.mark.integration

KEY = base64.b64encode(b"the key of the account").decode()
SAS = "sv=2021-12-02&sp=rl&sig=a%2Bb%2F%3D"
BODY = bytes(range(256)) * 20_000
FILES = {
    "models/m.mar": BODY,
    "models/folder/MAR-INF/MANIFEST.json": b"{}",
    "models/folder/deep/a b+ä.py": b"# file",
    "models/one/a.mar": b"archive",
    "models/two/a.mar": b"1",
    "models/two/b.mar": b"2",
}


@dataclass
class Account:
    """A storage account ``tests`` whose blobs need the key or the token, unless it is ``public``."""

    blobs: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    public: bool = False
    page_size: int = 2
    url: str = ""
    paths: list[str] = field(default_factory=list)

    def answer(self, handler: Any) -> None:
        self.paths.append(handler.path)
        url = urlsplit(handler.path)
        if url.path.endswith("/oauth2/v2.0/token"):
            form = dict(parse_qsl(handler.rfile.read(int(handler.headers["content-length"])).decode()))
            valid = url.path.startswith("/tenant/") and form["client_assertion"] == "proof"
            return send(handler, 200 if valid else 401, b'{"access_token": "issued"}')
        query = dict(parse_qsl(url.query))
        if not (self.public or self._is_signed(handler, url.path, query) or query.get("sig") == "a+b/="):
            return send(handler, 403, **{"x-ms-error-code": "AuthenticationFailed"})
        path = unquote(url.path).removeprefix("/tests/")
        if query.get("comp") == "list":
            if path != "models":
                return send(handler, 404, **{"x-ms-error-code": "ContainerNotFound"})
            return send(handler, 200, self._list(path, query))
        if path not in self.blobs:
            return send(handler, 404, **{"x-ms-error-code": "BlobNotFound"})
        return send(handler, 200, self.blobs[path])

    def _is_signed(self, handler: Any, path: str, query: dict[str, str]) -> bool:
        """Compare the signature of a request with that of its canonical form, as Azure defines it."""
        headers = sorted((k.lower(), v) for k, v in handler.headers.items() if k.lower().startswith("x-ms-"))
        lines = [handler.command, *[""] * 11, *(f"{name}:{value}" for name, value in headers)]
        lines += [f"/tests{path}", *(f"{name}:{query[name]}" for name in sorted(query))]
        signed = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        keys = f"SharedKey tests:{base64.b64encode(signed).decode()}", "Bearer issued"
        return handler.headers.get("authorization") in keys

    def _list(self, container: str, query: dict[str, str]) -> bytes:
        prefix = f"{container}/{query.get('prefix', '')}"
        names = sorted(name for name in self.blobs if name.startswith(prefix))
        start = int(query.get("marker") or 0)
        end = start + min(self.page_size, int(query["maxresults"]))
        blobs = "".join(
            f"<Blob><Name>{escape(name.partition('/')[2])}</Name><Properties><Etag>{hash(self.blobs[name])}</Etag>"
            f"<Content-Length>{len(self.blobs[name])}</Content-Length></Properties></Blob>"
            for name in names[start:end]
        )
        marker = str(end) if end < len(names) else ""
        return (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
        ).encode()


@contextlib.contextmanager
def serve_account(**options: Any) -> Iterator[Account]:
    account = Account(**options)
    with serving(lambda handler: account.answer(handler), "HTTP/1.1") as address:
        account.url = f"{address}/tests"
        yield account


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLIENT_ID", "TENANT_ID", "FEDERATED_TOKEN_FILE", "AUTHORITY_HOST"):
        monkeypatch.delenv(f"AZURE_{name}", raising=False)
    for name in ("ACCOUNT", "ACCOUNT_NAME", "ACCOUNT_KEY", "KEY", "SAS_TOKEN", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.fixture
def account() -> Iterator[Account]:
    with serve_account() as account:
        yield account


Get = Callable[..., Path]


@pytest.fixture
def get(tmp_path: Path) -> Get:
    into = tmp_path / "into"
    into.mkdir()

    def get(url: str, progress: Any = None, **az: Any) -> Path:
        settings = ModelStoreSettings(storage_options={"az": az} if az else {})
        try:
            return fetch(url, settings, tmp_path / "store", into, progress)
        except Exception:
            assert list(into.iterdir()) == []
            raise

    return get


def failed(get: Get, url: str, **az: Any) -> str:
    with pytest.raises(DownloadFailed) as error:
        get(url, **az)
    return str(error.value.detail)


def test_blob_with_shared_key_and_progress(get: Get, account: Account) -> None:
    seen: list[tuple[int, int | None]] = []
    options = {"account_name": "tests", "account_key": KEY, "endpoint": account.url}
    path = get("az://models/m.mar", lambda *at: seen.append(at), **options)
    assert (path.name, path.read_bytes()) == ("m.mar", BODY)
    assert seen[-1] == (len(BODY), len(BODY))


@pytest.mark.parametrize("token", [SAS, f"?{SAS}"])
def test_folder_with_a_token(get: Get, account: Account, token: str) -> None:
    folder = get("az://models/folder", account_name="tests", sas_token=token, endpoint=account.url)
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == {"MAR-INF/MANIFEST.json": b"{}", "deep/a b+ä.py": b"# file"}


def test_public_container_needs_no_credentials(get: Get) -> None:
    with serve_account(public=True) as account:
        assert get("az://models/one", endpoint=account.url).read_bytes() == b"archive"


def test_credentials_of_the_environment(get: Get, account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName=tests;AccountKey={KEY};BlobEndpoint={account.url};"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    assert get("az://models/m.mar").read_bytes() == BODY


def test_workload_identity_of_kubernetes(
    get: Get, account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proof = tmp_path / "token"
    proof.write_text("proof")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(proof))
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", account.url.removesuffix("/tests"))
    options = {"account_name": "tests", "endpoint": account.url}
    archive = get("az://models/one", **options)
    assert archive.read_bytes() == b"archive"
    archive.parent.rename(tmp_path / "before")
    assert len([path for path in account.paths if path.endswith("/token")]) == 1
    proof.write_text("expired")
    detail = failed(get, "az://models/m.mar", **options)
    assert "access was refused: the token service" in detail
    proof.unlink()
    assert "AZURE_FEDERATED_TOKEN_FILE" in failed(get, "az://models/m.mar", **options)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("az://models/none", {}, "there is no such"),
        ("az://none/m.mar", {}, "there is no such"),
        ("az://models/two", {}, "it holds 2 archives; specify the file"),
        ("az://models/m.mar", {"account_key": base64.b64encode(b"x").decode()}, "access was refused"),
        ("az://models/m.mar", {"account_key": "not base64"}, "account_key is not base64"),
        ("az://models/m.mar", {"acount": "tests"}, "unknown acount; known here: account_name"),
    ],
)
def test_errors_state_the_remedy(
    get: Get, account: Account, url: str, options: dict[str, str], message: str
) -> None:
    given = {"account_name": "tests", "account_key": KEY, "endpoint": account.url, **options}
    assert message in failed(get, url, **given)


def test_address_without_an_account_is_refused(get: Get) -> None:
    assert "az:// needs a storage account" in failed(get, "az://models/m.mar")


def test_credentials_are_for_their_own_account_only() -> None:
    account = BlobAccount.read({"account_name": "mine", "account_key": KEY, "sas_token": SAS}, {})
    assert account.endpoint == "https://mine.blob.core.windows.net"
    own, path = account.locate("mine.blob.core.windows.net/models/a b")
    assert (own, path) == (account, "models/a b")
    other, path = account.locate("other.blob.core.windows.net/models/m.mar")
    assert (other, path) == (BlobAccount("other", "https://other.blob.core.windows.net"), "models/m.mar")
    assert account.locate("evil.example.com/m.mar") == (account, "evil.example.com/m.mar"), "a container"
    china = BlobAccount.read({"connection_string": "AccountName=c;EndpointSuffix=core.chinacloudapi.cn"}, {})
    assert china.endpoint == "https://c.blob.core.chinacloudapi.cn"
    with pytest.raises(ConfigurationError):
        BlobAccount.read({"key": KEY}, {})


def test_container_is_listed_as_a_repository(account: Account, tmp_path: Path) -> None:
    account.blobs = {
        "models/r/digits/1.0/a.mar": b"1",
        "models/r/digits/2.0/a.mar": b"1",
        "models/x.mar": b"",
    }
    options = {"account_name": "tests", "account_key": KEY, "endpoint": account.url}
    store = ModelStoreSettings(storage_options={"az": options})
    repository = Repository(RepositorySettings(url="az://models/r"), store, tmp_path)
    entries = repository.list().entries
    assert [(entry.model, entry.version) for entry in entries.values()] == [
        ("digits", "1.0"),
        ("digits", "2.0"),
    ]
    account.blobs["models/r/digits/2.0/a.mar"] = b"2"
    changed = repository.list().entries
    assert [url for url in entries if changed[url].fingerprint != entries[url].fingerprint] == [
        "az://models/r/digits/2.0/a.mar"
    ]


def list_folder(account: Account, **settings: Any) -> dict[str, str]:
    options = {"account_name": "tests", "account_key": KEY, "endpoint": account.url}
    store = ModelStoreSettings(storage_options={"az": options}, **settings)
    return object_stores.list_files("az://models/r", store, lambda blob: str(blob["size"]))


def test_listing_is_limited(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.blobs = {f"models/r/{number}.mar": b"1" for number in range(4)}
    monkeypatch.setattr(object_stores, "MAX_LISTED", 4)
    assert len(list_folder(account)) == 4
    account.blobs["models/r/4.mar"] = b"1"
    with pytest.raises(DownloadFailed) as error:
        list_folder(account)
    assert "models/r has more than 4 files" in error.value.detail


def test_folder_of_a_model_is_limited(tmp_path: Path, account: Account) -> None:
    options = {"account_name": "tests", "account_key": KEY, "endpoint": account.url}
    store = ModelStoreSettings(storage_options={"az": options}, max_files=1)
    with pytest.raises(DownloadFailed) as error:
        fetch("az://models/folder", store, tmp_path / "store", tmp_path)
    assert "has more than 1 files" in error.value.detail


def test_endless_listing_ends_at_the_timeout(account: Account) -> None:
    page = b"<EnumerationResults><Blobs/><NextMarker>more</NextMarker></EnumerationResults>"
    account.answer = lambda handler: send(handler, 200, page)  # type: ignore[method-assign]
    with pytest.raises(DownloadFailed) as error:
        list_folder(account, download_timeout=1.0)
    assert "download_timeout (1 s)" in error.value.detail


ENTITIES = "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10}'>" for n in range(1, 10))
BOMB = f"<!DOCTYPE a [<!ENTITY e0 'entity'>{ENTITIES}]><a>&e9;</a>".encode()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"<EnumerationResults><Blobs>", "ParseError"),
        (BOMB, "amplification"),
        (b"<a>" + b" " * 65 * MIB, "more than"),
        (
            b"<a><Blob><Properties><Content-Length>x</Content-Length></Properties></Blob></a>",
            "invalid literal",
        ),
    ],
)
def test_malformed_listing_is_refused(account: Account, page: bytes, message: str) -> None:
    account.answer = lambda handler: send(handler, 200, page)  # type: ignore[method-assign]
    with pytest.raises(DownloadFailed) as error:
        list_folder(account)
    assert message in error.value.detail


def test_names_are_quoted_in_requests(get: Get, account: Account) -> None:
    get("az://models/folder", account_name="tests", account_key=KEY, endpoint=account.url)
    assert f"/tests/{quote('models/folder/deep/a b+ä.py')}" in account.paths
