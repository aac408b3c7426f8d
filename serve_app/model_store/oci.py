"""Models in OCI registries: artifacts whose layers are files, and images with a model under ``/models``.

A layer with a title is a file, as ``oras push`` writes it; a folder is a layer that has to be unpacked. The
layers of an image have no titles; their files below ``models/`` are the model, as for KServe's modelcars.
Every manifest and layer is verified against its digest.
Source: https://github.com/opencontainers/distribution-spec/blob/main/spec.md
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from serve_app.domain.urls import matches_any, redact_url
from serve_app.model_store.download import Deadline, ResponseReader, read_body
from serve_app.net.egress import PrivateAddress, PublicTransport
from serve_app.settings import MIB, is_loopback

_DOCKER_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}
_DOCKER_AUTHS = ("https://index.docker.io/v1/", "docker.io")  # Docker Hub's keys in a Docker configuration
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-f:]+\](?::\d+)?)"
    r"/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_EMPTY = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"
_UNPACK = "io.deis.oras.content.unpack"
_MAX_DOCUMENT = 4 * MIB  # of a manifest or a token, as registries limit them
_MAX_LAYERS = 10_000
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OPTIONS = {"username", "password", "token", "plain_http"}


@dataclass(frozen=True)
class OciReference:
    """An artifact in a registry; ``path`` is host and repository, ``version`` a tag or a digest."""

    host: str
    repository: str
    version: str

    @classmethod
    def parse(cls, text: str) -> OciReference:
        """Parse ``registry/repository[:tag][@digest]``; the default tag is ``latest``. Raises ValueError."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no reference; write oci://registry/repository:tag")
        return cls(match["host"], match["repository"], match["digest"] or match["tag"] or "latest")

    @property
    def path(self) -> str:
        return f"{self.host}/{self.repository}"


@dataclass(frozen=True)
class RegistryAccess:
    """The credentials of one registry, and whether it is reached without TLS."""

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  # is sent as it is
    plain_http: bool = False

    @classmethod
    def read(cls, host: str, options: Mapping[str, Any]) -> RegistryAccess:
        """Return the access of ``store.storage_options.oci`` by host, else of Docker's configuration.

        A registry on the loopback address is reached without TLS by default. Raises ValueError.
        """
        given = options.get(host)
        plain_http = is_loopback(urlsplit(f"//{host}").hostname or "")
        if given is None:
            username, password = _docker_login(host)
            return cls(username, password, plain_http=plain_http)
        if not isinstance(given, Mapping) or given.keys() - _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise ValueError(f"store.storage_options.oci.{host} is a mapping with some of: {known}")
        return cls(**{"plain_http": plain_http, **given})


@dataclass(frozen=True)
class RegistryRules:
    """The rules for the addresses of a registry's requests: also of its token service and of redirects.

    With patterns, the registry may be on a private network. What it names must be on its own host, have a
    public address, or match a pattern. Without patterns nothing is on a private network, unless the URL is
    the operator's.
    """

    host: str  # of the registry, without a port
    plain_http: bool
    patterns: tuple[str, ...] | None  # of store.allowed_urls
    by_operator: bool

    def check(self, request: httpx.Request) -> None:
        """Refuse a request without TLS that a registry with TLS leads to. Raises ValueError."""
        url = str(request.url)
        if request.url.scheme == "https" or self.plain_http or self._is_permitted(url):
            return
        cure = "set plain_http of the registry, or permit the URL in store.allowed_urls"
        raise ValueError(f"the registry {self.host} leads to {redact_url(url)} without TLS; {cure}")

    def may_be_private(self, url: httpx.URL) -> bool:
        if self.patterns is None:
            return self.by_operator
        return url.host == self.host or self._is_permitted(str(url))

    def describe(self, error: PrivateAddress) -> str:
        """Return the problem of a private address, and its remedy."""
        if error.host == self.host:
            return f"{error}; store.allowed_urls can allow it"
        cure = "permit its https URLs in store.allowed_urls"
        return f"the registry {self.host} leads to {error.host}, which is not a public address; {cure}"

    def _is_permitted(self, url: str) -> bool:
        return self.patterns is not None and matches_any(self.patterns, url)


class OciArtifact:
    """An artifact of a registry, with the methods of an fsspec file system that downloads need.

    Its files are the layers with titles. ``is_image`` is true where there are other layers.
    """

    def __init__(
        self,
        reference: OciReference,
        access: RegistryAccess,
        timeout: float,
        deadline: Deadline,
        patterns: tuple[str, ...] | None,
        by_operator: bool,
    ) -> None:
        self._reference = reference
        self._access = access
        scheme = "http" if access.plain_http else "https"
        host = _DOCKER_HUB.get(reference.host, reference.host)
        self._base = f"{scheme}://{host}/v2/{reference.repository}"
        self._timeout = timeout
        self._authorization = f"Bearer {access.token}" if access.token else ""
        rules = RegistryRules(httpx.URL(self._base).host, access.plain_http, patterns, by_operator)
        self._rules = rules
        self._client = httpx.Client(
            timeout=timeout,
            transport=PublicTransport(is_exempt=rules.may_be_private),
            follow_redirects=True,  # to a storage service; httpx sends no key to another host
            headers={"accept-encoding": "identity"},
            event_hooks={"request": [rules.check, deadline.watch]},
        )
        self._layers: list[dict[str, Any]] | None = None

    def close(self) -> None:
        self._client.close()

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The descriptors of the layers, the lowest first. Raises ValueError and httpx's errors."""
        if self._layers is None:
            layers = self._read_manifest(self._reference.version).get("layers")
            if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
                raise ValueError("its manifest has no layers")
            self._layers = [_check_descriptor(layer) for layer in layers]
            self._layers = [layer for layer in self._layers if layer["mediaType"] != _EMPTY]
        return self._layers

    @property
    def is_image(self) -> bool:
        return bool(self.layers) and not any(_title(layer) for layer in self.layers)

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "type": "directory"}

    def find(self, path: str, limit: int) -> dict[str, dict[str, Any]]:
        """Return the files by their paths below ``path``.

        A folder is a file ``.tar.gz``. Raises ValueError where it is not the only one.
        """
        files = {f"{path}/{_title(layer)}": layer for layer in self.layers if _title(layer)}
        if len(files) > 1 and any(_is_packed(layer) for layer in files.values()):
            raise ValueError("it has folders beside other files; push the model's folder alone, or its files")
        return files

    @contextlib.contextmanager
    def open(self, path: str, *_: Any, **__: Any) -> Iterator[ResponseReader]:
        """Read a file of ``find``. The last read raises ValueError where its digest differs."""
        name = path.removeprefix(f"{self._reference.path}/")
        layer = next(layer for layer in self.layers if _title(layer) == name)
        with self.open_layer(layer) as reader:
            yield reader

    @contextlib.contextmanager
    def open_layer(self, layer: Mapping[str, Any]) -> Iterator[ResponseReader]:
        """Read the blob of a layer, as ``open`` does."""
        digest = hashlib.sha256()
        size = 0

        def check(chunk: bytes) -> None:
            nonlocal size
            size += len(chunk)
            digest.update(chunk)
            if size > layer["size"] or (not chunk and size < layer["size"]):
                raise ValueError(f"{layer['digest']} has another size than its manifest states")
            if not chunk and f"sha256:{digest.hexdigest()}" != layer["digest"]:
                raise ValueError(f"its sha256 is {digest.hexdigest()} and should be {layer['digest']}")

        with self._get(f"blobs/{layer['digest']}") as response:
            yield ResponseReader(response, check)

    def _read_manifest(self, version: str, within_index: bool = False) -> dict[str, Any]:
        """Return a manifest; of an index that for this machine."""
        with self._get(f"manifests/{version}", accept=", ".join((*_MANIFESTS, *_INDEXES))) as response:
            body = read_body(response, _MAX_DOCUMENT, self._timeout)
            media_type = response.headers.get("content-type", "").partition(";")[0]
            stated = response.headers.get("docker-content-digest", "")
        for expected in (version, stated):
            if _DIGEST.fullmatch(expected) and hashlib.sha256(body).hexdigest() != expected[len("sha256:") :]:
                raise ValueError(f"the manifest is not the one of {expected}")
        document = _parse_object(body, "manifest")
        media_type = str(document.get("mediaType", media_type))
        if media_type not in _INDEXES and "manifests" not in document:
            return document
        if within_index:
            raise ValueError("an index of indexes is not supported")
        return self._read_manifest(_select_manifest(document), within_index=True)

    @contextlib.contextmanager
    def _get(self, path: str, accept: str = "*/*") -> Iterator[httpx.Response]:
        """Send a request, with a token where the registry requires one. Raises httpx's errors."""
        for is_last in (False, True):
            headers = {"accept": accept}
            if self._authorization:
                headers["authorization"] = self._authorization
            with self._stream(f"{self._base}/{path}", headers=headers) as response:
                is_ours = str(response.url).startswith(f"{self._base}/")
                # A storage service that a blob is redirected to must not name where the login is sent.
                if response.status_code == 401 and is_ours and not is_last:
                    self._authorization = self._authorize(response.headers.get("www-authenticate", ""))
                    continue
                self._check(response)
                yield response
                return

    @contextlib.contextmanager
    def _stream(self, url: str, **options: Any) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", url, **options) as response:
                yield response
        except PrivateAddress as error:
            raise ValueError(self._rules.describe(error)) from None

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        name = f"{self._reference.path}:{self._reference.version}"
        if response.status_code == 404:
            raise FileNotFoundError(name)
        reason = f"the registry responded {response.status_code} {response.reason_phrase} for {name}"
        raise httpx.HTTPStatusError(reason, request=response.request, response=response)

    def _authorize(self, challenge: str) -> str:
        """Return the header that a challenge of the registry requires; empty where none is known."""
        scheme, _, rest = challenge.partition(" ")
        access = self._access
        login = base64.b64encode(f"{access.username}:{access.password}".encode()).decode()
        if scheme.lower() == "basic":
            return f"Basic {login}" if access.username else ""
        if scheme.lower() != "bearer" or access.token:
            return self._authorization
        values = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = values.pop("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and access.plain_http):
            raise ValueError(f"its token service {realm!r} is not reached over TLS")
        query = {key: values[key] for key in ("service", "scope") if key in values}
        query.setdefault("scope", f"repository:{self._reference.repository}:pull")
        headers = {"authorization": f"Basic {login}"} if access.username else {}
        with self._stream(realm, params=query, headers=headers) as response:
            self._check(response)
            document = _parse_object(read_body(response, _MAX_DOCUMENT, self._timeout), "token")
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str):
            raise ValueError(f"the token service {realm} responded without a token")
        return f"Bearer {token}"


def _check_descriptor(layer: Any) -> dict[str, Any]:
    """Return a layer's descriptor. Raises ValueError where it is not as the specification has it."""
    is_valid = (
        isinstance(layer, dict)
        and isinstance(layer.get("size"), int)
        and isinstance(layer.get("mediaType"), str)
        and isinstance(layer.get("annotations") or {}, dict)
        and _DIGEST.fullmatch(str(layer.get("digest"))) is not None
    )
    if not is_valid:
        raise ValueError("a layer of its manifest has no type, size or sha256 digest")
    return {**layer, "annotations": layer.get("annotations") or {}}


def _title(layer: Mapping[str, Any]) -> str:
    """Return the name of a layer's file; empty for a layer of an image."""
    title = str(layer["annotations"].get(_TITLE, "")).strip("/")
    return f"{title}.tar.gz" if title and _is_packed(layer) else title


def _is_packed(layer: Mapping[str, Any]) -> bool:
    return str(layer["annotations"].get(_UNPACK, "")).lower() == "true"


def _parse_object(body: bytes, kind: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"the registry's {kind} is no JSON object")
    return document


def _select_manifest(index: Mapping[str, Any]) -> str:
    """Return the digest of the manifest for this machine, else of the first that names no platform."""
    entries = index.get("manifests")
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and _DIGEST.fullmatch(str(entry.get("digest"))):
            stated = entry.get("platform")
            target: dict[str, Any] = stated if isinstance(stated, dict) else {}
            name = f"{target.get('os', 'any')}/{target.get('architecture', 'any')}"
            found.setdefault(name, str(entry["digest"]))
    machine = platform.machine()
    for name in (f"linux/{_ARCHITECTURES.get(machine, machine)}", "any/any"):
        if name in found:
            return found[name]
    known = ", ".join(sorted(found)) or "none"
    raise ValueError(f"its index has no manifest for this machine, but for: {known}")


def _docker_login(host: str) -> tuple[str, str]:
    """Return the user and password of a registry in Docker's configuration, else empty texts."""
    folder = os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()
    try:
        document = json.loads((Path(folder) / "config.json").read_text())
        auths = document["auths"]
        keys = _DOCKER_AUTHS if host in _DOCKER_HUB else (host, f"https://{host}")
        entry = next(auths[key] for key in keys if key in auths)
        user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
        return user, password
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return "", ""
