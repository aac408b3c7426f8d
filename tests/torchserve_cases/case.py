"""A case of TorchServe's behaviour: an archive, the requests that are sent to it, and their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.archives import make_archive

ANSWERS = Path(__file__).with_name("answers.json")
# Headers that are compared; a case may name more.
HEADERS = ("content-type",)


@dataclass(frozen=True)
class Request:
    """A request to ``/predictions/CASE`` and what follows it."""

    body: bytes = b"1"
    headers: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""  # after the model's name
    method: str = "POST"
    route: str = "predictions"


@dataclass(frozen=True)
class Case:
    """An author's archive and its requests.

    ``difference`` is the reason why the answers of the two servers differ.
    """

    name: str
    handler: str
    requests: tuple[Request, ...] = (Request(),)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the registration
    version: str = "1.0"
    headers: tuple[str, ...] = HEADERS
    difference: str = ""

    def make_archive(self, folder: Path) -> Path:
        config = dict(self.config) if self.config is not None else None
        files = dict(self.files)
        return make_archive(folder, self.name, self.handler, self.version, files, config, dict(self.manifest))


def ask(value: Any = 1, **options: Any) -> Request:
    """Return a request with a JSON body."""
    return Request(json.dumps(value).encode(), {"Content-Type": "application/json"}, **options)


def form(parts: Iterable[bytes]) -> Request:
    """Return a multipart form of parts, each with its headers."""
    body = b"".join(b"--limit\r\n" + part + b"\r\n" for part in parts) + b"--limit--\r\n"
    return Request(body, {"Content-Type": "multipart/form-data; boundary=limit"})


def run_case(case: Case, inference: str, registration: httpx.Response) -> dict[str, Any]:
    """Send a case's requests; return the status of its registration, and its answers."""
    answers: list[dict[str, Any]] = []
    if registration.status_code == 200:
        for request in case.requests:
            url = f"{inference}/{request.route}/{case.name}{request.suffix}"
            with httpx.Client(timeout=60) as client:
                response = client.request(request.method, url, content=request.body, headers=request.headers)
            answers.append(read_answer(response, case.headers))
    return {"registration": registration.status_code, "answers": answers}


def read_answer(response: httpx.Response, headers: Iterable[str]) -> dict[str, Any]:
    """Return what is compared of a response: of an error, its status alone."""
    if response.status_code >= 400:
        return {"status": response.status_code}
    try:
        body: Any = {"json": json.loads(response.content)}
    except ValueError:
        body = {"text": response.content.decode("latin-1")}
    found = {name: response.headers[name] for name in headers if name in response.headers}
    return {"status": response.status_code, **body, "headers": found}
