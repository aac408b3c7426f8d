"""A small OCI registry for tests: manifests, blobs with real digests, and tokens."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import ssl
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_server import serving

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def make_layer(files: dict[str, bytes], packed: bool = True) -> bytes:
    """Return a tar of these files, as a layer of an image has them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0) if packed else buffer.getvalue()


@dataclass
class Registry:
    """The contents of a registry; with ``login`` it requires a token, which a login gets."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # by tag and by digest
    login: str = ""  # USER:PASSWORD
    basic: bool = False  # it takes the login itself
    redirect: str = ""  # where blobs are
    realm: str = ""  # the address of the token service; empty: its own
    requests: list[tuple[str, str]] = field(default_factory=list)  # path and authorization
    url: str = ""

    @property
    def host(self) -> str:
        return self.url.partition("://")[2]

    def add_blob(self, content: bytes) -> str:
        self.blobs[digest_of(content)] = content
        return digest_of(content)

    def add_manifest(self, tag: str, document: dict[str, Any], media_type: str = MANIFEST) -> str:
        body = json.dumps({"schemaVersion": 2, "mediaType": media_type, **document}).encode()
        self.manifests[tag] = self.manifests[digest_of(body)] = media_type, body
        return digest_of(body)

    def push(self, tag: str, files: dict[str, bytes], **annotations: str) -> str:
        """Add an artifact with a layer for each file, as `oras push` does; return its digest."""
        layers = [
            {
                "mediaType": "application/octet-stream",
                "digest": self.add_blob(content),
                "size": len(content),
                "annotations": {"org.opencontainers.image.title": name, **annotations},
            }
            for name, content in files.items()
        ]
        return self.add_manifest(tag, {"layers": layers})

    def push_image(self, tag: str, *layers: bytes) -> str:
        """Add an image of these layers; return its digest."""
        described = [{"mediaType": LAYER, "digest": self.add_blob(one), "size": len(one)} for one in layers]
        return self.add_manifest(tag, {"layers": described})

    def answer(self, handler: Any) -> None:
        url = urlsplit(handler.path)
        authorization = handler.headers.get("authorization", "")
        self.requests.append((url.path, authorization))
        if url.path == "/token":
            return self._answer_token(handler, authorization, parse_qs(url.query))
        if self.login and authorization != (self._basic if self.basic else "Bearer secret-token"):
            realm = f"{self.realm or self.url}/token"
            challenge = f'Bearer realm="{realm}",service="tests",scope="repository:team/m:pull"'
            return send(handler, 401, **{"www-authenticate": 'Basic realm="x"' if self.basic else challenge})
        kind, _, name = url.path.removeprefix("/v2/team/m/").partition("/")
        if kind == "manifests" and name in self.manifests:
            media_type, body = self.manifests[name]
            headers = {"content-type": media_type, "docker-content-digest": digest_of(body)}
            return send(handler, 200, body, **headers)
        if kind == "blobs" and name in self.blobs:
            if self.redirect:
                return send(handler, 307, location=f"{self.redirect}{url.path}")
            return send(handler, 200, self.blobs[name])
        return send(handler, 404)

    @property
    def _basic(self) -> str:
        return f"Basic {base64.b64encode(self.login.encode()).decode()}"

    def _answer_token(self, handler: Any, authorization: str, query: dict[str, list[str]]) -> None:
        if authorization != self._basic or query.get("scope") != ["repository:team/m:pull"]:
            return send(handler, 401)
        return send(handler, 200, json.dumps({"token": "secret-token"}).encode())


def send(handler: Any, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        with contextlib.suppress(ConnectionError):  # the client may have read enough
            handler.wfile.write(body)


@contextlib.contextmanager
def serve_registry(tls: ssl.SSLContext | None = None, **options: Any) -> Iterator[Registry]:
    registry = Registry(**options)
    with serving(registry.answer, "HTTP/1.1", context=tls) as registry.url:
        yield registry
