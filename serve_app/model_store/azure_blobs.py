"""Azure Blob Storage over its REST API, with the methods of an fsspec file system that downloads need.

The API has three calls here: Get Blob, Get Blob Properties and List Blobs. Requests are authorized by a SAS
token, by Shared Key or by a workload identity of Kubernetes, and are anonymous where there is none of them.
Sources: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key,
https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit
from xml.etree import ElementTree

import httpx

from serve_app.errors import ConfigurationError
from serve_app.model_store.download import Deadline, ResponseReader, iterate_chunks, read_body
from serve_app.settings import MIB

_API_VERSION = "2021-12-02"
_DOMAINS = ("core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn")
_ACCOUNT_HOST = re.compile(rf"([a-z0-9]{{3,24}})\.blob\.(?:{'|'.join(map(re.escape, _DOMAINS))})")
_MAX_PAGE_BYTES = 64 * MIB  # of a page of 5,000 blobs; names have at most 1,024 characters
_MAX_TOKEN_BYTES = MIB
_OPTIONS = ("account_name", "account_key", "sas_token", "connection_string", "endpoint")
# As of Azure's command line and of adlfs.
_VARIABLES = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
}
_CONNECTION_KEYS = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_token",
    "BlobEndpoint": "endpoint",
}


@dataclass(frozen=True)
class WorkloadIdentity:
    """An identity of Microsoft Entra, which a token of Kubernetes in a file proves."""

    client_id: str
    tenant_id: str
    token_file: str
    authority: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> WorkloadIdentity | None:
        """Return the identity of the variables that AKS sets; None where they are absent."""
        client = environment.get("AZURE_CLIENT_ID")
        tenant = environment.get("AZURE_TENANT_ID")
        file = environment.get("AZURE_FEDERATED_TOKEN_FILE")
        authority = environment.get("AZURE_AUTHORITY_HOST") or "https://login.microsoftonline.com"
        return cls(client, tenant, file, authority.rstrip("/")) if client and tenant and file else None

    def request_token(self, timeout: float, deadline: Deadline) -> str:
        """Return an access token for storage accounts. Raises ValueError and httpx's errors."""
        try:
            proof = Path(self.token_file).read_text()
        except OSError as error:
            raise ValueError(
                f"AZURE_FEDERATED_TOKEN_FILE {self.token_file} cannot be read: {error.strerror}"
            ) from None
        form = {
            "client_id": self.client_id,
            "client_assertion": proof,
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "grant_type": "client_credentials",
            "scope": "https://storage.azure.com/.default",
        }
        url = f"{self.authority}/{self.tenant_id}/oauth2/v2.0/token"
        client = httpx.Client(timeout=timeout, event_hooks={"request": [deadline.watch]})
        with client, client.stream("POST", url, data=form) as response:
            if not response.is_success:
                message = f"the token service {url} responded {response.status_code}"
                raise httpx.HTTPStatusError(message, request=response.request, response=response)
            body = read_body(response, _MAX_TOKEN_BYTES, timeout)
        try:
            return str(json.loads(body)["access_token"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"the token service {url} responded without a token") from None


@dataclass(frozen=True)
class BlobAccount:
    """A storage account and its credentials; without any, requests are anonymous."""

    name: str
    endpoint: str
    key: bytes = field(default=b"", repr=False)
    sas_token: str = field(default="", repr=False)
    identity: WorkloadIdentity | None = None  # where there is neither key nor token

    @classmethod
    def read(cls, options: Mapping[str, Any], environment: Mapping[str, str]) -> BlobAccount:
        """Return the account of ``store.storage_options.az``, else of the environment.

        A connection string stands for the other options. Raises ConfigurationError.
        """
        if unknown := options.keys() - {*_OPTIONS}:
            known = ", ".join(_OPTIONS)
            raise ConfigurationError(
                "store.storage_options.az", f"unknown {min(unknown)}; known here: {known}"
            )
        values = {name: str(value) for name, value in options.items()}
        if not values:
            for name, variables in _VARIABLES.items():
                found = next((environment[v] for v in variables if environment.get(v)), "")
                if found:
                    values[name] = found
        for part in values.pop("connection_string", "").split(";"):
            name, _, value = part.partition("=")
            if option := _CONNECTION_KEYS.get(name):
                values[option] = value
            elif name == "EndpointSuffix":
                values["suffix"] = value
        name = values.get("account_name", "")
        suffix = values.get("suffix", _DOMAINS[0])
        endpoint = values.get("endpoint", "").rstrip("/") or (f"https://{name}.blob.{suffix}" if name else "")
        try:
            account_key = base64.b64decode(values.get("account_key", ""), validate=True)
        except ValueError:
            raise ConfigurationError(
                "store.storage_options.az", "account_key is not base64; copy it again"
            ) from None
        sas_token = values.get("sas_token", "").lstrip("?")
        identity = None if account_key or sas_token else WorkloadIdentity.read(environment)
        return cls(name, endpoint, account_key, sas_token, identity)

    def locate(self, path: str) -> tuple[BlobAccount, str]:
        """Return the account of an address, and the path in it: container and blob.

        ``az://account.blob.core.windows.net/container/blob`` names another account, which gets no
        credentials of this one. Raises ConfigurationError where no account is known.
        """
        host, _, rest = path.partition("/")
        match = _ACCOUNT_HOST.fullmatch(host)
        if match is not None:
            is_own = match[1] == self.name
            return (self if is_own else BlobAccount(match[1], f"https://{host}")), rest
        if not self.endpoint:
            raise ConfigurationError(
                "store.storage_options.az",
                "az:// needs a storage account: set account_name, AZURE_STORAGE_ACCOUNT_NAME, or write "
                "az://ACCOUNT.blob.core.windows.net/CONTAINER/PATH",
            )
        return self, path


class AzureBlobs:
    """The blobs of a storage account; paths begin with the container."""

    def __init__(self, account: BlobAccount, timeout: float, deadline: Deadline) -> None:
        self._account = account
        self._timeout = timeout
        self._deadline = deadline
        self._token = ""  # of the account's identity
        self._client = httpx.Client(
            timeout=timeout,
            headers={"x-ms-version": _API_VERSION, "accept-encoding": "identity"},
            event_hooks={"request": [self._authorize, deadline.watch]},
        )

    def close(self) -> None:
        self._client.close()

    def info(self, path: str) -> dict[str, Any]:
        """Return the type of a path, and a blob's size. Raises FileNotFoundError and HTTPStatusError."""
        if "/" in path:
            response = self._client.head(self._url(path))
            if response.status_code != 404:
                _check(response)
                size = int(response.headers.get("content-length", 0))
                return {"name": path, "type": "file", "size": size}
        if next(self._list(path, limit=1), None) is None:
            raise FileNotFoundError(path)
        return {"name": path, "type": "directory"}

    def find(self, path: str, limit: int) -> dict[str, dict[str, Any]]:
        """Return the blobs below a path, up to one more than ``limit``. Raises HTTPStatusError."""
        return {blob["name"]: blob for blob in itertools.islice(self._list(path), limit + 1)}

    @contextlib.contextmanager
    def open(self, path: str, *_: Any, **__: Any) -> Iterator[ResponseReader]:
        """Read a blob. Raises FileNotFoundError and HTTPStatusError."""
        with self._client.stream("GET", self._url(path)) as response:
            _check(response, path)
            yield ResponseReader(response)

    def _url(self, path: str) -> str:
        return f"{self._account.endpoint}/{quote(path)}"

    def _list(self, path: str, limit: int = 5000) -> Iterator[dict[str, Any]]:
        container, _, folder = path.strip("/").partition("/")
        query = {"restype": "container", "comp": "list", "maxresults": str(limit)}
        if folder:
            query["prefix"] = f"{folder}/"
        marker = ""
        while True:
            pages = {**query, "marker": marker} if marker else query
            marker = ""
            with self._client.stream("GET", self._url(container), params=pages) as response:
                _check(response, path)
                for element in _iterate_elements(response):
                    if element.tag == "Blob":
                        yield from _describe_blob(element, container)
                    elif element.tag == "NextMarker":
                        marker = element.text or ""
            if not marker or limit == 1:
                return

    def _authorize(self, request: httpx.Request) -> None:
        account = self._account
        if account.sas_token:
            request.url = request.url.copy_merge_params(dict(parse_qsl(account.sas_token)))
        elif account.key:
            request.headers["x-ms-date"] = formatdate(usegmt=True)
            signature = hmac.new(account.key, _text_to_sign(request, account.name).encode(), hashlib.sha256)
            encoded = base64.b64encode(signature.digest()).decode()
            request.headers["authorization"] = f"SharedKey {account.name}:{encoded}"
        elif account.identity is not None:
            self._token = self._token or account.identity.request_token(self._timeout, self._deadline)
            request.headers["authorization"] = f"Bearer {self._token}"


def _describe_blob(blob: ElementTree.Element, container: str) -> Iterator[dict[str, Any]]:
    name = f"{container}/{blob.findtext('Name')}"
    size = int(blob.findtext("Properties/Content-Length") or 0)
    if not (size == 0 and blob.findtext("Properties/ResourceType") == "directory"):
        yield {"name": name, "type": "file", "size": size, "etag": blob.findtext("Properties/Etag")}


def _iterate_elements(response: httpx.Response) -> Iterator[ElementTree.Element]:
    """Yield the elements of a page of a listing as they arrive; its blobs are dropped afterwards.

    Raises ValueError for a page of more than ``_MAX_PAGE_BYTES``.
    """
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    received = 0
    blobs: ElementTree.Element | None = None
    for chunk in iterate_chunks(response):
        received += len(chunk)
        if received > _MAX_PAGE_BYTES:
            raise ValueError(f"the server's response has more than {_MAX_PAGE_BYTES:,} bytes")
        parser.feed(chunk)
        for event, element in parser.read_events():
            if event == "start":
                blobs = element if element.tag == "Blobs" else blobs
                continue
            yield element
            if element.tag == "Blob" and blobs is not None:
                blobs.clear()
    parser.close()


def _check(response: httpx.Response, path: str = "") -> None:
    """Raise the error of a response: FileNotFoundError, or HTTPStatusError with the server's code."""
    if response.is_success:
        return
    code = response.headers.get("x-ms-error-code", "")
    if response.status_code == 404:
        raise FileNotFoundError(f"{path} ({code})" if code else path)
    message = f"the server responded {response.status_code} {code or response.reason_phrase}"
    raise httpx.HTTPStatusError(message, request=response.request, response=response)


def _text_to_sign(request: httpx.Request, account: str) -> str:
    """Return the text whose HMAC authorizes a request without a body."""
    headers = {name.lower(): value.strip() for name, value in request.headers.items()}
    ours = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-"))
    parts = urlsplit(str(request.url))
    query: dict[str, list[str]] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        query.setdefault(name.lower(), []).append(value)
    resource = f"/{account}{parts.path}"
    resource += "".join(f"\n{name}:{','.join(sorted(query[name]))}" for name in sorted(query))
    # Eleven standard headers, of which a request without a body and conditions has none.
    return f"{request.method}\n" + "\n" * 11 + ours + resource


def read_account(options: Mapping[str, Any]) -> BlobAccount:
    """Return the account of the settings, else of this process's environment. Raises ConfigurationError."""
    return BlobAccount.read(options, os.environ)
