"""Sources: what a URL may name, and downloads from a real HTTP server."""

import contextlib
import threading

import pytest

from serve_app.errors import ArchiveNotFound, DownloadFailed
from serve_app.model_store.sources import fetch, split_digest
from serve_app.settings import ModelStoreSettings
from tests.support.http_server import dripping, serving, trusted_tls
from tests.support.ports import refusing_port

BODY = bytes(range(256)) * 5000


@pytest.fixture
def store(tmp_path):
    """Create a model store with each kind of entry, and files outside it."""
    store = tmp_path / "model_store"
    (store / "plain" / "MAR-INF").mkdir(parents=True)
    (store / "team").mkdir()
    for name in ("m.mar", "m.tar.gz", "team/n.mar"):
        (store / name).write_bytes(b"archive")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o.mar").write_bytes(b"archive")
    (store / "out.mar").symlink_to(outside / "o.mar")
    (store / "out").symlink_to(outside)
    (store / "same.mar").symlink_to("m.mar")
    (store / "loop").symlink_to("loop")
    return store


@pytest.fixture
def get(store, tmp_path):
    """``get(url, **settings)``: fetch with a model store and a place for downloads."""
    into = tmp_path / "into"
    into.mkdir()

    def get(url, progress=None, **settings):
        settings = {"allowed_urls": ("file://.*", "http(s)?://.*", "s3://.*"), **settings}
        try:
            return fetch(url, ModelStoreSettings(**settings), store, into, progress)
        except Exception:
            assert list(into.iterdir()) == []
            raise

    return get


def plain(handler, missing=0):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY) + missing))
    handler.end_headers()
    handler.wfile.write(BODY)


@pytest.mark.parametrize("name", ["m.mar", "m.tar.gz", "plain", "plain/", "team/n.mar", "same.mar"])
def test_a_name_in_the_model_store(get, store, name):
    assert get(name, allowed_urls=()) == store / name


def test_a_file_url_and_an_absolute_path(get, store, tmp_path):
    outside = tmp_path / "outside"
    assert get(f"file://{outside}/o.mar") == outside / "o.mar"
    assert get(f"file://localhost{outside}/o.mar") == outside / "o.mar"
    assert get(str(outside)) == outside
    (outside / "a b.mar").write_bytes(b"")
    assert get((outside / "a b.mar").as_uri()) == outside / "a b.mar"
    assert get(str(store / "m.mar"), allowed_urls=()) == store / "m.mar"


def refused(get, url, message, **settings):
    with pytest.raises(ArchiveNotFound) as error:
        get(url, **settings)
    assert str(error.value) == message


def test_what_is_not_there_is_not_found(get, tmp_path):
    refused(get, "", "empty url")
    for url in ("absent.mar", ".", "loop", "a\0b", "n" * 5000):
        refused(get, url, f"Model not found at: {url}")
    for url in (f"file://{tmp_path}/absent.mar", "file://elsewhere/m.mar"):
        failed(get, url, "no such file or directory")  # 400, as a download that fails; TorchServe's as well
    refused(get, f"{tmp_path}/absent", f"Model not found at: {tmp_path}/absent")


@pytest.mark.parametrize(
    "url", ["../o.mar", "team/../m.mar", "file:///models/../etc", "http://h/%2e%2e/m.mar", ".."]
)
def test_a_relative_path_is_refused(get, url):
    refused(get, url, f"Relative path is not allowed in url: {url}")


@pytest.mark.parametrize("name", ["out.mar", "out", "out/o.mar"])
def test_a_link_out_of_the_model_store_is_refused(get, name):
    with pytest.raises(ArchiveNotFound, match=f"Model not found at: {name} .*leaves the model store"):
        get(name)


def test_a_url_must_match_in_full(get, tmp_path):
    only = {"allowed_urls": ("https://models.example/.*", "file:///models/.*")}
    here = f"file://{tmp_path}"
    for url in ("http://models.example/m.mar", "xhttps://models.example/m.mar", here, "s3://bucket/m.mar"):
        refused(get, url, f"Given URL {url} does not match any allowed URL(s)", **only)
    url = "https://models.example/m.mar?evil"
    refused(
        get,
        url,
        "Given URL https://models.example/m.mar does not match any allowed URL(s)",
        allowed_urls=(r"https://models.*/m\.mar",),
    )
    refused(get, str(tmp_path), f"Given URL {tmp_path} does not match any allowed URL(s)", **only)


def test_another_scheme_names_those_there_are(get):
    with pytest.raises(DownloadFailed) as error:
        get("ftp://host/m.mar", allowed_urls=("ftp://.*",))
    assert str(error.value) == "Failed to download archive from: ftp://host/m.mar"
    assert "ftp:// is not supported; use file://, http(s)://, s3://, gs://, hf://" in error.value.detail


def test_a_download(get):
    seen = []
    with serving(plain) as address:
        file = get(f"{address}/models/m.mar?token=x", progress=lambda *at: seen.append(at))
        get(f"{address}/a b.mar", allowed_urls=(f"{address}/a b.mar",))
    assert file.name == "m.mar"
    assert file.read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))


@pytest.mark.parametrize("path, name", [("", "archive"), ("/a%2fb.mar", "a_b.mar"), ("/.hidden", "hidden")])
def test_the_name_of_a_download_is_a_plain_one(get, path, name):
    with serving(plain) as address:
        assert get(address + path).name == name


def failed(get, url, *words, **settings):
    with pytest.raises(DownloadFailed) as error:
        get(url, **settings)
    assert str(error.value) == f"Failed to download archive from: {url}"
    for word in words:
        assert word in error.value.detail


def test_an_error_status_is_reported(get):
    with serving(lambda handler: handler.send_error(404)) as address:
        failed(get, f"{address}/m.mar", "404 Not Found")


def test_a_body_shorter_than_it_says_is_an_error(get):
    with serving(lambda handler: plain(handler, missing=1)) as address:
        failed(get, f"{address}/m.mar")


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(BODY)


@pytest.mark.parametrize("answer", [plain, endless])
def test_a_download_too_large_is_an_error(get, answer):
    with serving(answer) as address:
        failed(get, f"{address}/m.mar", "max_archive_bytes (1000)", max_archive_bytes=1000)


def test_a_download_too_slow_is_an_error(get):
    with serving(endless) as address:
        failed(get, f"{address}/m.mar", "download_timeout (1 s)", download_timeout=1.0)
    gone = threading.Event()
    with serving(lambda handler: gone.wait()) as address:
        try:
            failed(get, f"{address}/m.mar", "download_timeout (0.2 s)", download_timeout=0.2)
        finally:
            gone.set()


def test_headers_end_at_the_timeout(get, tmp_path, monkeypatch):
    with dripping() as address:
        failed(get, f"{address}/m.mar", "download_timeout (1 s)", download_timeout=1.0)
    with dripping(context=trusted_tls(tmp_path, monkeypatch)) as address:
        failed(get, f"{address}/m.mar", "download_timeout (1 s)", download_timeout=1.0)


def test_redirects_end_at_the_timeout(get):
    ended = threading.Event()

    def redirect(handler):
        ended.wait(0.2)
        handler.send_response(302)
        handler.send_header("Location", "/again.mar")
        handler.end_headers()

    with serving(redirect) as address:
        failed(get, f"{address}/m.mar", "download_timeout (1 s)", download_timeout=1.0)


@pytest.mark.parametrize("url", ["http://[", "https://[::1", "oci://[::1/m", "http://[v1.x]/m.mar"])
def test_what_is_no_url_is_an_error(get, url):
    with pytest.raises(DownloadFailed):
        get(url, allowed_urls=None)


def test_nobody_there_is_an_error(get):
    with refusing_port() as port:
        failed(get, f"http://127.0.0.1:{port}/m.mar", "ConnectError")
    failed(get, "http://127.0.0.1:99999999/m.mar")


def test_a_redirect_must_be_allowed_too(get):
    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{target}/m.mar")
        handler.end_headers()

    with serving(plain) as target, serving(redirect) as address:
        assert get(f"{address}/m.mar").read_bytes() == BODY
        (get(f"{address}/m.mar")).unlink()
        refused(
            get,
            f"{address}/m.mar",
            f"Given URL {target}/m.mar does not match any allowed URL(s)",
            allowed_urls=(f"{address}/.*",),
        )


# Without store.allowed_urls


@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "file://localhost/etc/passwd"])
def test_without_patterns_no_file_is_read(get, url):
    with pytest.raises(ArchiveNotFound) as error:
        get(url, allowed_urls=None)
    assert str(error.value).startswith(f"Given URL {url} does not match any allowed URL(s) (a file outside")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "localhost"])
def test_without_patterns_no_private_address_is_requested(get, host):
    requests = []

    def answer(handler):
        requests.append(handler.path)
        plain(handler)

    with serving(answer) as address:
        url = f"http://{host}:{address.rpartition(':')[2]}/m.mar"
        reason = f"{host.strip('[]')} is not a public address; store.allowed_urls can allow it"
        refused(get, url, f"Given URL {url} does not match any allowed URL(s) ({reason})", allowed_urls=None)
    assert requests == []


def test_urls_of_the_operator_reach_everything(get, store, tmp_path):
    settings = ModelStoreSettings()
    into = tmp_path / "operator"
    into.mkdir()
    outside = tmp_path / "outside" / "o.mar"
    assert fetch(outside.as_uri(), settings, store, into, by_operator=True) == outside
    with serving(plain) as address:
        assert fetch(f"{address}/m.mar", settings, store, into, by_operator=True).read_bytes() == BODY


@pytest.mark.parametrize(
    "url, address, digest",
    [
        ("m.mar", "m.mar", None),
        ("m.mar#sha256=ab", "m.mar", "ab"),
        ("https://h/m.mar?sha256=ab", "https://h/m.mar", "ab"),
        ("https://h/m.mar?a=1&sha256=ab&b=2", "https://h/m.mar?a=1&b=2", "ab"),
        ("https://h/m.mar?sha256=kept#sha256=ab", "https://h/m.mar?sha256=kept", "ab"),
        ("https://h/m.mar?x-sha256=ab#top", "https://h/m.mar?x-sha256=ab#top", None),
    ],
)
def test_the_digest_of_a_url(url, address, digest):
    assert split_digest(url) == (address, digest)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@127.0.0.1:1/m.mar?key=secret",  # no server
        "http://user:secret@127.0.0.1/m.mar?key=secret",  # a private address
        "ftp://user:secret@host/m.mar?key=secret",
        "https://user:secret@host/../m.mar?key=secret",
        "file://user:secret@/m.mar?key=secret",
        "absent.mar?key=secret",
    ],
)
def test_errors_show_a_url_without_credentials(get, url):
    """They are logged, and stand in the event history of the model."""
    options = {"allowed_urls": None} if url.startswith(("http:", "ftp:")) else {}
    with pytest.raises((ArchiveNotFound, DownloadFailed)) as raised:
        get(url, download_timeout=2.0, **options)
    shown = f"{raised.value} {getattr(raised.value, 'detail', '')} {raised.value!r}"
    assert "secret" not in shown and "m" in shown


def test_errors_of_a_server_and_of_limits_show_no_credentials(get):
    with serving(lambda handler: handler.send_error(403)) as address:
        url = address.replace("http://", "http://user:secret@") + "/m.mar?key=secret"
        with pytest.raises(DownloadFailed, match=r"from: http://127.0.0.1:\d+/m.mar$"):
            get(url)
    with serving(plain) as address, pytest.raises(DownloadFailed, match=r"m\.mar$"):
        get(f"{address}/m.mar?key=secret", max_archive_bytes=1)
