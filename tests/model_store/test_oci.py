"""Models in an OCI registry: a server with real digests, tokens, and contents that are not as stated."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import ArchiveNotFound, DownloadFailed, InvalidArchive
from serve_app.model_store.oci import OciReference
from serve_app.model_store.sources import fetch
from serve_app.settings import MIB, ModelStoreSettings
from tests.support.archives import ECHO, make_archive
from tests.support.http_server import serving, trusted_tls
from tests.support.oci_registry import INDEX, LAYER, Registry, make_layer, serve_registry

pytestmark = pytest.mark.integration

BODY = bytes(range(256)) * 20_000  # several chunks
FOLDER = {"config.json": b"{}", "model.safetensors": BODY, "deep/extra.json": b"1"}
Get = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_docker_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serve_registry() as registry:
        yield registry


@pytest.fixture
def get(tmp_path: Path) -> Get:
    into = tmp_path / "into"
    into.mkdir()

    def get(url: str, progress: Any = None, **settings: Any) -> Path:
        settings = {"allowed_urls": ("oci://.*",), **settings}
        try:
            return fetch(url, ModelStoreSettings(**settings), tmp_path / "store", into, progress)
        except Exception:
            assert list(into.iterdir()) == []
            raise

    return get


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failed(get: Get, url: str, **settings: Any) -> str:
    with pytest.raises(DownloadFailed) as error:
        get(url, **settings)
    return str(error.value.detail)


def test_archive_by_tag_and_by_digest_with_progress(get: Get, registry: Registry, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "m", ECHO).read_bytes()
    digest = registry.push("v1", {"m.mar": archive, "README.md": b"text"})
    seen: list[tuple[int, int | None]] = []
    path = get(f"oci://{registry.host}/team/m:v1", lambda *at: seen.append(at))
    assert (path.name, path.read_bytes()) == ("m.mar", archive)
    assert seen[-1] == (len(archive), len(archive))
    path.parent.rename(tmp_path / "before")
    assert get(f"oci://{registry.host}/team/m@{digest}").read_bytes() == archive


def test_files_are_a_models_directory(get: Get, registry: Registry) -> None:
    registry.push("latest", FOLDER)
    folder = get(f"oci://{registry.host}/team/m")
    assert folder.name == "m"
    assert read_files(folder) == FOLDER


def test_folder_of_oras_is_an_archive(get: Get, registry: Registry, tmp_path: Path) -> None:
    layer = make_layer({"model/MAR-INF/MANIFEST.json": b"{}"})
    registry.push("v1", {"model": layer}, **{"io.deis.oras.content.unpack": "true"})
    path = get(f"oci://{registry.host}/team/m:v1")
    assert (path.name, path.read_bytes()) == ("model.tar.gz", layer)
    path.parent.rename(tmp_path / "before")
    registry.push("v2", {"model": layer, "b": layer}, **{"io.deis.oras.content.unpack": "true"})
    assert "it has folders beside other files" in failed(get, f"oci://{registry.host}/team/m:v2")


@pytest.mark.parametrize("packed", [True, False])
def test_image_has_its_model_below_models(get: Get, registry: Registry, packed: bool) -> None:
    lower = make_layer(
        {"etc/passwd": b"root", "models/config.json": b"old", "models/gone.txt": b"1", "models/d/x": b"1"},
        packed,
    )
    upper = make_layer(
        {"models/.wh.gone.txt": b"", "models/d/.wh..wh..opq": b"", "models/config.json": b"{}"}, packed
    )
    registry.push_image("v1", lower, upper, make_layer({"models/model.safetensors": BODY}, packed))
    folder = get(f"oci://{registry.host}/team/m:v1")
    assert read_files(folder) == {"config.json": b"{}", "model.safetensors": BODY}


@pytest.mark.parametrize("whiteout", [".wh.models", ".wh..wh..opq", "models/.wh..wh..opq"])
def test_layer_can_hide_the_whole_model_below(get: Get, registry: Registry, whiteout: str) -> None:
    upper = make_layer({whiteout: b"", "models/config.json": b"{}", "models/model.safetensors": b"1"})
    registry.push_image("v1", make_layer({"models/deep/old.txt": b"1", "models/x": b"1"}), upper)
    folder = get(f"oci://{registry.host}/team/m:v1")
    assert read_files(folder) == {"config.json": b"{}", "model.safetensors": b"1"}


def test_image_with_an_archive_or_without_a_model(get: Get, registry: Registry, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "m", ECHO).read_bytes()
    registry.push_image("v1", make_layer({"models/m.mar": archive}))
    assert get(f"oci://{registry.host}/team/m:v1").read_bytes() == archive


def test_image_that_is_no_model_or_hostile_is_refused(get: Get, registry: Registry) -> None:
    for tag, files, message in (
        ("none", {"bin/sh": b"x"}, "has no files below /models"),
        ("out", {"models/../../out": b"x"}, "leaves, or may leave, the model's directory"),
        ("whiteout", {"models/../.wh.out": b"x"}, "leaves, or may leave, the model's directory"),
        ("parent", {"models/.wh...": b"x"}, "leaves the model's directory"),
    ):
        registry.push_image(tag, make_layer(files))
        with pytest.raises(InvalidArchive, match=message):
            get(f"oci://{registry.host}/team/m:{tag}")
    registry.push_image("cut", make_layer({"models/x": BODY})[:-1000])
    with pytest.raises(InvalidArchive, match="damaged"):
        get(f"oci://{registry.host}/team/m:cut")


def make_entries(count: int, **fields: Any) -> bytes:
    """Return a layer with an entry many times, before a file of zeros in the model."""
    info, zeros = tarfile.TarInfo("etc"), tarfile.TarInfo("models/zeros")
    for name, value in fields.items():
        setattr(info, name, value)
    zeros.size = 16 * MIB
    header = info.tobuf(tarfile.GNU_FORMAT)
    return gzip.compress(header * count + zeros.tobuf() + bytes(zeros.size + 1024))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (make_entries(20, type=tarfile.DIRTYPE, size=-1_000_000), "negative size"),
        (make_entries(40_000), "max_ratio"),
        (make_entries(20, name="models/.wh.x"), "max_files"),
    ],
)
def test_entries_outside_the_model_do_not_evade_limits(
    get: Get, registry: Registry, layer: bytes, message: str
) -> None:
    registry.push_image("v1", layer)
    with pytest.raises(InvalidArchive, match=message):
        get(f"oci://{registry.host}/team/m:v1", max_files=10)


def test_index_selects_the_manifest_of_this_machine(
    get: Get, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    manifests = [
        {"digest": registry.push("-", {f"{name}.mar": name.encode()}), "platform": platform}
        for name, platform in (
            ("attestation", {"os": "unknown", "architecture": "unknown"}),
            ("amd", {"os": "linux", "architecture": "amd64"}),
            ("arm", {"os": "linux", "architecture": "arm64"}),
        )
    ]
    registry.add_manifest("all", {"manifests": manifests}, INDEX)
    registry.add_manifest("amd", {"manifests": manifests[:2]}, INDEX)
    assert get(f"oci://{registry.host}/team/m:all").name == "arm.mar"


def test_index_without_this_machine_names_the_others(
    get: Get, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    digest = registry.push("-", {"a.mar": b"a"})
    entry = {"digest": digest, "platform": {"os": "linux", "architecture": "amd64"}}
    registry.add_manifest("amd", {"manifests": [entry]}, INDEX)
    assert "but for: linux/amd64" in failed(get, f"oci://{registry.host}/team/m:amd")


def test_token_is_requested_with_the_login(get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_registry(login="me:secret") as registry:
        registry.push("v1", {"m.mar": b"archive"})
        url = f"oci://{registry.host}/team/m:v1"
        detail = failed(get, url)
        assert "access was refused" in detail and "docker login" in detail
        oci = {registry.host: {"username": "me", "password": "wrong"}}
        assert "access was refused" in failed(get, url, storage_options={"oci": oci})
        oci[registry.host]["password"] = "secret"
        path = get(url, storage_options={"oci": oci})
        assert path.read_bytes() == b"archive"
        path.parent.rename(tmp_path / "before")
        (tmp_path / "docker").mkdir()
        auths = {registry.host: {"auth": base64.b64encode(b"me:secret").decode()}}
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": auths}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        assert get(url).read_bytes() == b"archive"


def test_basic_login_and_a_given_token(get: Get, tmp_path: Path) -> None:
    with serve_registry(login="me:secret", basic=True) as registry:
        registry.push("v1", {"m.mar": b"archive"})
        oci = {registry.host: {"username": "me", "password": "secret"}}
        path = get(f"oci://{registry.host}/team/m:v1", storage_options={"oci": oci})
        assert path.read_bytes() == b"archive"
        path.parent.rename(tmp_path / "before")
    with serve_registry(login="me:secret") as registry:
        registry.push("v1", {"m.mar": b"archive"})
        oci = {registry.host: {"token": "secret-token"}}
        assert get(f"oci://{registry.host}/team/m:v1", storage_options={"oci": oci})
        assert "/token" not in [path for path, _ in registry.requests]


def test_key_is_not_sent_to_the_storage_of_blobs(get: Get) -> None:
    with serve_registry() as storage, serve_registry(login="me:secret", redirect=storage.url) as registry:
        registry.push("v1", {"m.mar": b"archive"})
        storage.push("v1", {"m.mar": b"archive"})
        oci = {registry.host: {"username": "me", "password": "secret"}}
        get(f"oci://{registry.host}/team/m:v1", storage_options={"oci": oci})
        assert [authorization for _, authorization in storage.requests] == [""]


def test_storage_of_blobs_names_no_token_service(get: Get) -> None:
    with (
        serve_registry(login="other:one") as storage,
        serve_registry(login="me:secret", redirect=storage.url) as registry,
    ):
        registry.push("v1", {"m.mar": b"archive"})
        oci = {registry.host: {"username": "me", "password": "secret"}}
        detail = failed(get, f"oci://{registry.host}/team/m:v1", storage_options={"oci": oci})
        assert "access was refused" in detail
        assert [authorization for _, authorization in storage.requests] == [""]


@pytest.mark.parametrize("kind", ["manifests", "blobs"])
def test_response_that_arrives_byte_by_byte_is_ended(get: Get, kind: str) -> None:
    registry, ended = Registry(), threading.Event()
    registry.push("v1", {"m.mar": bytes(1000)})

    def answer(handler: Any) -> None:
        if f"/{kind}/" not in handler.path:
            return registry.answer(handler)
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            while not ended.wait(0.05):
                handler.wfile.write(b" ")

    with serving(answer) as registry.url:
        try:
            detail = failed(get, f"oci://{registry.host}/team/m:v1", download_timeout=1.0)
        finally:
            ended.set()
    assert "within 1 s" in detail or "within download_timeout (1 s)" in detail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blobs, digest: blobs.update({digest: b"other..."}), "its sha256 is"),
        (lambda blobs, digest: blobs.update({digest: b"archive and more"}), "another size"),
        (lambda blobs, digest: blobs.update({digest: b"arc"}), "another size"),
        (lambda blobs, digest: blobs.clear(), "there is no such"),
    ],
)
def test_blob_that_is_not_the_stated_one_is_refused(
    get: Get, registry: Registry, change: Any, message: str
) -> None:
    registry.push("v1", {"m.mar": b"archive!"})
    (digest,) = registry.blobs
    change(registry.blobs, digest)
    assert message in failed(get, f"oci://{registry.host}/team/m:v1")


def test_manifest_that_is_not_the_requested_one_is_refused(get: Get, registry: Registry) -> None:
    digest = registry.push("v1", {"m.mar": b"archive"})
    registry.manifests[digest] = registry.manifests[registry.push("v2", {"m.mar": b"other"})]
    assert f"the manifest is not the one of {digest}" in failed(get, f"oci://{registry.host}/team/m@{digest}")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"layers": "none"}, "its manifest has no layers"),
        ({"layers": [{"mediaType": LAYER, "size": 1, "digest": "md5:1"}]}, "no type, size or sha256 digest"),
        ({"layers": [7]}, "no type, size or sha256 digest"),
        ({"layers": []}, "it holds neither MAR-INF nor an archive"),
        ({"manifests": [7]}, "no manifest for this machine"),
    ],
)
def test_malformed_manifests_are_refused(
    get: Get, registry: Registry, document: dict[str, Any], message: str
) -> None:
    registry.add_manifest("v1", document)
    assert message in failed(get, f"oci://{registry.host}/team/m:v1")


def test_title_that_leaves_the_directory_is_refused(get: Get, registry: Registry) -> None:
    registry.push("v1", {"../out": b"x", "MAR-INF/MANIFEST.json": b"{}"})
    assert "leaves the model's directory" in failed(get, f"oci://{registry.host}/team/m:v1")


def test_references_and_options_that_are_wrong(get: Get, registry: Registry) -> None:
    assert "no reference; write oci://registry/repository:tag" in failed(get, "oci://host")
    assert "there is no such" in failed(get, f"oci://{registry.host}/team/m:none")
    wrong = {"oci": {registry.host: {"user": "me"}}}
    assert "with some of: password, plain_http" in failed(
        get, f"oci://{registry.host}/team/m:v1", storage_options=wrong
    )
    assert "ConnectError" in failed(get, "oci://127.0.0.1:1/team/m:v1")


def test_private_registry_needs_the_operators_permission(get: Get, registry: Registry) -> None:
    registry.push("v1", {"m.mar": b"archive"})
    url = f"oci://{registry.host}/team/m:v1"
    assert "is not a public address; store.allowed_urls can allow it" in failed(get, url, allowed_urls=None)
    assert registry.requests == []
    with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
        get(url, allowed_urls=("https://.*",))


def on_localhost(server: Registry) -> str:
    """Return the address of a server under another host name."""
    return server.url.replace("127.0.0.1", "localhost")


def test_private_storage_of_blobs_needs_a_pattern(get: Get) -> None:
    with serve_registry() as storage, serve_registry(redirect=on_localhost(storage)) as registry:
        registry.push("v1", {"m.mar": b"archive"})
        storage.push("v1", {"m.mar": b"archive"})
        url = f"oci://{registry.host}/team/m:v1"
        detail = failed(get, url)
        assert "127.0.0.1 leads to localhost, which is not a public address" in detail
        assert storage.requests == []
        patterns = ("oci://.*", f"{on_localhost(storage)}/.*")
        assert get(url, allowed_urls=patterns).read_bytes() == b"archive"


def test_private_token_service_needs_a_pattern(get: Get) -> None:
    login = "me:secret"
    with (
        serve_registry(login=login) as tokens,
        serve_registry(login=login, realm=on_localhost(tokens)) as registry,
    ):
        registry.push("v1", {"m.mar": b"archive"})
        url = f"oci://{registry.host}/team/m:v1"
        options = {"oci": {registry.host: {"username": "me", "password": "secret"}}}
        assert "leads to localhost, which is not" in failed(get, url, storage_options=options)
        assert tokens.requests == []
        patterns = ("oci://.*", f"{on_localhost(tokens)}/token.*")
        assert get(url, allowed_urls=patterns, storage_options=options).read_bytes() == b"archive"


def test_operators_registry_may_lead_anywhere(tmp_path: Path) -> None:
    with serve_registry() as storage, serve_registry(redirect=on_localhost(storage)) as registry:
        registry.push("v1", {"m.mar": b"archive"})
        storage.push("v1", {"m.mar": b"archive"})
        url = f"oci://{registry.host}/team/m:v1"
        path = fetch(url, ModelStoreSettings(), tmp_path / "store", tmp_path, by_operator=True)
        assert path.read_bytes() == b"archive"


def test_registry_with_tls_leads_to_no_address_without(
    get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = trusted_tls(tmp_path, monkeypatch)
    with serve_registry() as storage, serve_registry(tls=tls, redirect=storage.url) as registry:
        registry.push("v1", {"m.mar": b"archive"})
        storage.push("v1", {"m.mar": b"archive"})
        url = f"oci://{registry.host}/team/m:v1"
        options = {"oci": {registry.host: {"plain_http": False}}}
        assert "without TLS" in failed(get, url, storage_options=options)
        assert storage.requests == []
        patterns = ("oci://.*", f"{storage.url}/.*")
        assert get(url, allowed_urls=patterns, storage_options=options).read_bytes() == b"archive"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ghcr.io/a/b", ("ghcr.io", "a/b", "latest")),
        ("localhost:5000/m:1.0", ("localhost:5000", "m", "1.0")),
        ("ghcr.io/a/b:v1@sha256:" + "0" * 64, ("ghcr.io", "a/b", "sha256:" + "0" * 64)),
    ],
)
def test_references(text: str, expected: tuple[str, str, str]) -> None:
    reference = OciReference.parse(text)
    assert (reference.host, reference.repository, reference.version) == expected
