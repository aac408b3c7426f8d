"""Archives from object stores: a real S3 server with its own rights, and small servers that speak the
others' HTTP.
"""

import contextlib
import json
import os
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
import requests

from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.model_store import object_stores
from serve_app.model_store.repository import Repository
from serve_app.model_store.sources import fetch
from serve_app.settings import ModelStoreSettings, RepositorySettings
from tests.support.http_server import dripping, serving
from tests.support.s3_server import running_s3

pytestmark = pytest.mark.integration


# Else gcsfs asks for a bucket's kind over gRPC first, which no small server here speaks; read when it is
# imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

BODY = bytes(range(256)) * 80_000  # 20 MB: more than one piece


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch, tmp_path):
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def s3():
    """Start an S3 server with ``models/m.mar``, a model's folder, and a folder of two archives; yield its
    address.
    """
    with running_s3("models") as client:
        client.put_object(Bucket="models", Key="m.mar", Body=BODY)
        client.put_object(Bucket="models", Key="folder/MAR-INF/MANIFEST.json", Body=b"{}")
        client.put_object(Bucket="models", Key="folder/deep/handler.py", Body=b"# handler")
        client.put_object(Bucket="models", Key="one/a.mar", Body=b"archive")
        client.put_object(Bucket="models", Key="one/README.md", Body=b"text")
        for name in ("two/a.mar", "two/b.tar.gz"):
            client.put_object(Bucket="models", Key=name, Body=b"archive")
        client.put_object(Bucket="models", Key="evil/MAR-INF/MANIFEST.json", Body=b"{}")
        client.put_object(Bucket="models", Key="evil/../../out", Body=b"out")
        yield client.meta.endpoint_url


@pytest.fixture
def get(tmp_path):
    into = tmp_path / "into"
    into.mkdir()

    def get(url, progress=None, signed=False, **settings):
        try:
            return fetch(url, ModelStoreSettings(**settings), tmp_path / "store", into, progress, signed)
        except Exception:
            assert list(into.iterdir()) == []
            raise

    return get


def options(address, **more):
    return {"s3": {"endpoint_url": address, "key": "any", "secret": "any", **more}}


def failed(get, url, *words, **settings):
    with pytest.raises(DownloadFailed) as error:
        get(url, **settings)
    assert str(error.value) == f"Failed to download archive from: {url}"
    for word in words:
        assert word in error.value.detail
    return error.value.detail


def test_an_object_with_its_progress(get, s3):
    seen = []
    file = get("s3://models/m.mar", lambda *at: seen.append(at), storage_options=options(s3))
    assert file.name == "m.mar"
    assert file.read_bytes() == BODY
    assert seen[0] == (0, len(BODY))
    assert seen[-1] == (len(BODY), len(BODY))
    assert len(seen) > 2


def test_a_folder_is_a_model_or_stands_for_its_one_archive(get, s3):
    folder = get("s3://models/folder", storage_options=options(s3))
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "MAR-INF/MANIFEST.json",
        "deep/handler.py",
    ]


def test_a_folder_of_one_archive(get, s3):
    assert get("s3://models/one/", storage_options=options(s3)).name == "a.mar"


def test_a_folder_that_is_neither(get, s3):
    failed(get, "s3://models/two", "2 archives", "specify the file", storage_options=options(s3))
    failed(get, "s3://models/evil", "leaves the model's directory", storage_options=options(s3))


def test_what_is_not_there(get, s3):
    failed(get, "s3://models/absent.mar", "no such bucket", storage_options=options(s3))
    failed(get, "s3://absent/m.mar", "no such bucket", storage_options=options(s3))


def test_limits_hold_here_too(get, s3):
    failed(
        get,
        "s3://models/m.mar",
        "max_archive_bytes (1000)",
        storage_options=options(s3),
        max_archive_bytes=1000,
    )
    failed(get, "s3://models/m.mar", "download_timeout", storage_options=options(s3), download_timeout=0.001)


def test_a_scheme_that_is_not_allowed(get):
    with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
        get("s3://models/m.mar", allowed_urls=("file://.*",))


def test_no_credentials_wrong_ones_and_ones_that_may_not(get, s3):
    no_metadata = {"s3": {"endpoint_url": s3}}
    detail = failed(
        get, "s3://models/m.mar", "access was refused", "AWS_ACCESS_KEY_ID", storage_options=no_metadata
    )
    assert "store.storage_options.s3.anon" in detail
    iam = boto3.client(
        "iam", "us-east-1", endpoint_url=s3, aws_access_key_id="any", aws_secret_access_key="any"
    )
    iam.create_user(UserName="guest")
    key = iam.create_access_key(UserName="guest")["AccessKey"]
    # From here on the server looks at who asks.
    requests.post(f"{s3}/moto-api/reset-auth", data=b"0", timeout=60)
    try:
        wrong = options(s3, key="AKIANOBODY", secret="nothing")
        failed(get, "s3://models/m.mar", "access was refused", storage_options=wrong)
        wrong = options(s3, key=key["AccessKeyId"], secret="nothing")
        failed(get, "s3://models/m.mar", "access was refused", storage_options=wrong)
        refused = options(s3, key=key["AccessKeyId"], secret=key["SecretAccessKey"])
        failed(get, "s3://models/m.mar", "access was refused", storage_options=refused)
    finally:
        requests.post(f"{s3}/moto-api/reset-auth", data=b"Infinity", timeout=60)


def test_a_package_that_is_not_there_is_named(get, monkeypatch):
    monkeypatch.setattr(object_stores, "is_installed", lambda scheme: False)
    failed(get, "s3://models/m.mar", "pip install torchrelay[s3]")
    failed(get, "gs://models/m.mar", "pip install torchrelay[gcs]")
    failed(get, "hf://owner/name", "pip install torchrelay[hf]")


@pytest.mark.parametrize(
    "url, path, region",
    [
        ("https://models.s3.eu-west-1.amazonaws.com/a/m.mar", "models/a/m.mar", "eu-west-1"),
        ("https://my.models.s3-us-west-2.amazonaws.com/m%20m.mar", "my.models/m m.mar", "us-west-2"),
        ("https://models.s3.amazonaws.com/m.mar", "models/m.mar", None),
        ("https://s3.dualstack.us-east-2.amazonaws.com/models/m.mar", "models/m.mar", "us-east-2"),
        ("https://s3.cn-north-1.amazonaws.com.cn/models/m.mar", "models/m.mar", "cn-north-1"),
    ],
)
def test_an_https_url_of_s3(url, path, region):
    found = object_stores.s3_address(url)
    assert (found.scheme, found.path) == ("s3", path)
    assert found.region == (region or "")


@pytest.mark.parametrize(
    "url",
    [
        "https://models.s3.amazonaws.com/m.mar?X-Amz-Signature=0",  # signed already
        "http://models.s3.amazonaws.com/m.mar",
        "https://example.com/s3.amazonaws.com/m.mar",
        "https://models.s3.amazonaws.com.example.com/m.mar",
    ],
)
def test_other_urls_are_the_webs(url):
    assert object_stores.s3_address(url) is None


def test_an_https_url_of_s3_is_signed_where_there_are_credentials(get, s3, monkeypatch):
    url = "https://models.s3.us-east-1.amazonaws.com/m.mar"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)  # in Amazon's place
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    elsewhere = {"s3": {"endpoint_url": "http://127.0.0.1:1", "client_kwargs": {"region_name": "eu-west-1"}}}
    assert get(url, storage_options=elsewhere).read_bytes() == BODY


def test_s3_sse_kms_asks_with_credentials_or_not_at_all(get, s3, monkeypatch):
    url = "https://models.s3.us-east-1.amazonaws.com/m.mar"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    failed(get, url, "access was refused", signed=True)
    assert get(url, signed=True, storage_options=options(s3)).read_bytes() == BODY


def test_bucket_is_listed_as_a_repository(s3, tmp_path):
    client = boto3.client(
        "s3", "us-east-1", endpoint_url=s3, aws_access_key_id="a", aws_secret_access_key="b"
    )
    for key in ("digits/1.0/MAR-INF/MANIFEST.json", "digits/1.0/w.pt", "digits/2.0/a.mar", "top.mar"):
        client.put_object(Bucket="models", Key=f"followed/{key}", Body=b"1")
    settings = ModelStoreSettings(storage_options=options(s3))
    repository = Repository(RepositorySettings(url="s3://models/followed/"), settings, tmp_path)

    def listed():
        return {
            url.removeprefix("s3://models/followed/"): (entry.model, entry.version, entry.fingerprint)
            for url, entry in repository.list().entries.items()
        }

    before, entries = listed(), repository.list().entries
    names = {path: entry[:2] for path, entry in before.items()}
    both = {"digits/1.0": ("digits", "1.0"), "digits/2.0/a.mar": ("digits", "2.0")}
    assert names == {**both, "top.mar": (None, None)}
    client.put_object(Bucket="models", Key="followed/digits/1.0/w.pt", Body=b"2")
    assert {path for path, entry in listed().items() if before[path] != entry} == {"digits/1.0"}
    unchanged = {url.rpartition("/")[2]: repository.is_unchanged(entry) for url, entry in entries.items()}
    assert unchanged == {"1.0": False, "a.mar": True, "top.mar": True}
    refused = Repository(RepositorySettings(url="s3://none/models"), settings, tmp_path)
    with pytest.raises(DownloadFailed) as error:
        refused.list()
    assert "there is no such bucket" in error.value.detail


def test_listings_of_buckets_and_hubs_are_limited(get, s3, monkeypatch):
    store = ModelStoreSettings(storage_options=options(s3))
    monkeypatch.setattr(object_stores, "MAX_LISTED", 2)
    assert len(object_stores.list_files("s3://models/two", store, str)) == 2
    monkeypatch.setattr(object_stores, "MAX_LISTED", 1)
    with pytest.raises(DownloadFailed) as error:
        object_stores.list_files("s3://models/two", store, str)
    assert "models/two has more than 1 files" in error.value.detail
    failed(get, "s3://models/folder", "more than 1 files", storage_options=options(s3), max_files=1)
    with hub(FILES) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        failed(get, "hf://owner/name", "more than 2 files", max_files=2)


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_slow_servers_end_at_the_timeout(get, monkeypatch, scheme):
    with dripping("HTTP/1.1") as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        server = {**options(address), "gs": {"endpoint_url": address, "token": "anon"}}
        url = f"{scheme}://owner/name"
        failed(get, url, "download_timeout (1 s)", storage_options=server, download_timeout=1.0)
        with pytest.raises(DownloadFailed) as error:
            store = ModelStoreSettings(storage_options=server, download_timeout=1.0)
            object_stores.list_files(url, store, str)
        assert "download_timeout (1 s)" in error.value.detail


def test_s3_sse_kms_of_another_url(get):
    failed(get, "https://example.com/m.mar", "s3_sse_kms is for", signed=True)


def answering(answer):
    """Serve GET and HEAD with ``answer(handler, path)``; yield the address."""
    return serving(lambda handler: answer(handler, unquote(handler.path)), "HTTP/1.1")


def say(handler, status, body=b"", **headers):
    handler.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    if handler.command == "GET":
        with contextlib.suppress(ConnectionError):  # who asks may have seen enough
            handler.wfile.write(body)


def ranged(handler, content, **headers):
    """Return the part of ``content`` that the request's Range selects."""
    requested = handler.headers.get("Range")
    if requested is None:
        return say(handler, 200, content, **headers)
    start, end = requested.removeprefix("bytes=").split("-")
    part = content[int(start) : int(end) + 1]
    whole = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
    return say(handler, 206, part, Content_Range=whole, **headers)


def test_a_server_that_dies_in_mid_download(get):
    def answer(handler, path):
        if handler.command == "HEAD":
            return say(handler, 200, BODY, ETag='"1"', Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT")
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(BODY)))
        handler.end_headers()
        handler.wfile.write(BODY[:1000])
        handler.close_connection = True

    seen = []
    with answering(answer) as address:
        detail = failed(get, "s3://models/m.mar", storage_options=options(address))
    assert detail
    assert seen == []


FILES = {
    "MAR-INF/MANIFEST.json": b"{}",
    "handler.py": b"# handler",
    "weights/model.bin": BODY,
}


def hub(files, commit="0" * 40):
    """Serve the endpoints of a hub that holds owner/name."""

    def answer(handler, path):
        path, _, _ = path.partition("?")
        if path.startswith("/api/models/owner/name/paths-info/") or handler.command == "POST":
            return say(handler, 404)
        if path in ("/api/models/owner/name", "/api/models/owner/name/revision/main"):
            body = {"id": "owner/name", "modelId": "owner/name", "sha": commit, "siblings": []}
            return say(handler, 200, json.dumps(body).encode(), Content_Type="application/json")
        if path.startswith("/api/models/owner/name/tree/main"):
            prefix = path.removeprefix("/api/models/owner/name/tree/main").strip("/")
            inside = {name: content for name, content in files.items() if name.startswith(prefix)}
            entries = [
                {"type": "file", "path": n, "size": len(c), "oid": "1" * 40} for n, c in inside.items()
            ]
            folders = {name.rpartition("/")[0] for name in inside if "/" in name}
            entries += [{"type": "directory", "path": name, "size": 0, "oid": "2" * 40} for name in folders]
            return say(handler, 200, json.dumps(entries).encode(), Content_Type="application/json")
        if path.startswith("/owner/name/resolve/main/"):
            content = files.get(path.removeprefix("/owner/name/resolve/main/"))
            if content is not None:
                return ranged(handler, content, ETag='"1"', X_Repo_Commit=commit)
        if "/private/" in path:
            return say(handler, 403)
        return say(handler, 404, b"", X_Error_Code="RepoNotFound")

    return answering(answer)


def test_a_model_on_a_hub(get, monkeypatch):
    seen = []
    with hub(FILES) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        folder = get("hf://owner/name", lambda *at: seen.append(at))
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES
    total = sum(map(len, FILES.values()))
    assert seen[-1] == (total, total)


def test_a_model_folder_on_a_hub_comes_without_its_other_formats(get, monkeypatch):
    """As a hub has it: no archive, and the same weights many times over."""
    needed = {
        "config.json": b"{}",
        "model.safetensors": BODY,
        "tokenizer.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "README.md": b"card",
    }
    others = (
        "pytorch_model.bin",
        "tf_model.h5",
        "onnx/model.onnx",
        "openvino/model.bin",
        ".gitattributes",
        "m.gguf",
    )
    with hub({**needed, **dict.fromkeys(others, b"much")}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        folder = get("hf://owner/name")
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == needed
    assert folder.name == "name"


def test_an_archive_on_a_hub(get, monkeypatch):
    with hub({"README.md": b"text", "m.mar": b"archive"}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert get("hf://owner/name").name == "m.mar"


def test_a_file_of_a_hub_by_its_name(get, monkeypatch):
    with hub({"a.mar": b"a", "b.mar": b"b"}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert get("hf://owner/name/b.mar").read_bytes() == b"b"


def test_what_a_hub_has_not(get, monkeypatch):
    with hub({"weights.bin": b"w"}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        failed(get, "hf://owner/name", "neither MAR-INF nor an archive")
        failed(get, "hf://owner/absent", "no such")
        failed(get, "hf://owner/name/absent.mar", "no such")


@pytest.fixture
def gs():
    """Storage options of a server that holds gs://models/m.mar."""
    facts = {
        "name": "m.mar",
        "bucket": "models",
        "size": str(len(BODY)),
        "updated": "2024-01-01T00:00:00.000Z",
    }

    def answer(handler, path):
        if "alt=media" in path:
            return ranged(handler, BODY)
        if path.startswith("/storage/v1/b/models/o/m.mar"):
            return say(handler, 200, json.dumps(facts).encode(), Content_Type="application/json")
        if path.startswith("/storage/v1/b/secret/"):
            return say(
                handler, 403, b'{"error": {"code": 403, "message": "no"}}', Content_Type="application/json"
            )
        return say(
            handler, 404, b'{"error": {"code": 404, "message": "Not Found"}}', Content_Type="application/json"
        )

    with answering(answer) as address:
        yield {"gs": {"endpoint_url": address, "token": "anon"}}


def test_an_object_of_google_cloud_storage(get, gs):
    assert get("gs://models/m.mar", storage_options=gs).read_bytes() == BODY


def test_what_google_cloud_storage_refuses(get, gs):
    failed(get, "gs://absent/m.mar", "no such", storage_options=gs)
    failed(get, "gs://secret/m.mar", "access was refused", storage_options=gs)


def test_pages_of_listings_are_not_larger_than_every_s3_server_allows() -> None:
    keys = [f"folder/{number}.bin" for number in range(3)]

    def answer(request: Any) -> None:
        query = parse_qs(urlsplit(request.path).query)
        if int(query["max-keys"][0]) > 1000:
            return request.send_error(400)
        first = int(query.get("continuation-token", ["0"])[0])
        is_last = first + 1 == len(keys)
        token = "" if is_last else f"<NextContinuationToken>{first + 1}</NextContinuationToken>"
        body = (
            f"<ListBucketResult><IsTruncated>{str(not is_last).lower()}</IsTruncated>{token}<Contents>"
            f"<Key>{keys[first]}</Key><Size>1</Size></Contents></ListBucketResult>"
        ).encode()
        request.send_response(200)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with serving(answer) as address:
        settings = ModelStoreSettings(storage_options=options(address))
        found = object_stores.list_files("s3://models/folder", settings, lambda details: str(details["size"]))
    assert found == {"0.bin": "1", "1.bin": "1", "2.bin": "1"}
