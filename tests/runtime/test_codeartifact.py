"""Private repositories of AWS CodeArtifact: a fake of its API, a real index, and the real pip."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from serve_app.errors import InstallFailed
from serve_app.runtime import codeartifact
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.settings import RuntimeSettings
from tests.runtime.test_package_envs import DIGEST, wheel
from tests.support.http_server import serving

pytestmark = pytest.mark.slow

ARN = "arn:aws:codeartifact:eu-west-1:123456789012:repository/team/pypi"
TOKEN = "secret/to+ken="


class Repository:
    """A fake of CodeArtifact, and the index of one package behind its token."""

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        self.authorizations: list[str] = []
        self.status = 200

    def answer(self, request: Any) -> None:
        url = urlsplit(request.path)
        self.requests.append((url.path, parse_qs(url.query)))
        host = request.headers["host"]
        if url.path.startswith("/v1/"):
            content: bytes = json.dumps(
                {"message": "User is not authorized"}
                if self.status != 200
                else {"authorizationToken": TOKEN, "repositoryEndpoint": f"http://{host}/pypi/pypi/"}
            ).encode()
            self._send(request, self.status, "application/json", content)
            return
        self.authorizations.append(request.headers.get("authorization", ""))
        if self.authorizations[-1] != f"Basic {base64.b64encode(f'aws:{TOKEN}'.encode()).decode()}":
            self._send(request, 401, "text/plain", b"")
        elif url.path == "/pypi/pypi/simple/tinypkg/":
            links = "".join(f'<a href="/files/{file.name}">{file.name}</a>' for file in self.wheels.iterdir())
            self._send(
                request, 200, "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            )
        else:
            self._send(request, 200, "application/zip", (self.wheels / Path(url.path).name).read_bytes())

    def _send(self, request: Any, status: int, content_type: str, content: bytes) -> None:
        request.send_response(status)
        if status == 401:
            request.send_header("www-authenticate", 'Basic realm="index"')
        request.send_header("content-type", content_type)
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    wheel(tmp_path / "wheels", "tinypkg", "1.0")
    made = Repository(tmp_path / "wheels")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with serving(made.answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield made


@pytest.fixture
def environments(tmp_path: Path) -> PackageEnvs:
    return PackageEnvs(tmp_path / "environments", RuntimeSettings(pip_index_url=ARN))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "requirements.txt").write_text("tinypkg==1.0\n")
    return folder


def test_packages_are_installed_with_a_token_of_their_own(
    repository: Repository, environments: PackageEnvs, directory: Path
) -> None:
    lines: list[str] = []
    packages = environments.build("m", directory, "requirements.txt", DIGEST, lines.append)
    assert (packages / "tinypkg.py").is_file()
    named = {"domain": ["team"], "domain-owner": ["123456789012"]}
    assert repository.requests[:2] == [
        ("/v1/authorization-token", named),
        ("/v1/repository/endpoint", {**named, "repository": ["pypi"], "format": ["pypi"]}),
    ]
    assert repository.authorizations
    assert TOKEN not in "\n".join(lines) and "secret" not in "\n".join(lines), "pip prints the index"


def test_a_role_without_the_right_is_named_with_what_it_needs(
    repository: Repository, environments: PackageEnvs, directory: Path, tmp_path: Path
) -> None:
    repository.status = 403
    with pytest.raises(InstallFailed) as error:
        environments.build("m", directory, "requirements.txt", DIGEST)
    assert error.value.detail.startswith(
        f"runtime.pip_index_url: {ARN}: CodeArtifact gives no token for it: "
    )
    assert "not authorized" in error.value.detail and "sts:GetServiceBearerToken" in error.value.detail
    assert list((tmp_path / "environments/.partial").iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        "arn:aws:s3:::bucket",
        "arn:aws:codeartifact:eu-west-1:1:repository/a/b",
        ARN.rpartition("/")[0],
        "arn:",
    ],
)
def test_another_arn_is_refused_with_the_form(value: str, directory: Path, tmp_path: Path) -> None:
    environments = PackageEnvs(tmp_path / "environments", RuntimeSettings(pip_index_url=value))
    with pytest.raises(InstallFailed) as error:
        environments.build("m", directory, "requirements.txt", DIGEST)
    expected = f"{value} is no repository of CodeArtifact, which is arn:aws:codeartifact:REGION"
    assert error.value.detail.startswith(f"runtime.pip_index_url: {expected}")


def test_the_url_has_the_token_and_the_path_of_simple_indexes(repository: Repository) -> None:
    url = urlsplit(codeartifact.authorized_index(ARN))
    assert (url.username, url.password, url.path) == ("aws", "secret%2Fto%2Bken%3D", "/pypi/pypi/simple/")
