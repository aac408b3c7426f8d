"""The handler of Azure ML's scoring scripts: ``init`` and ``run`` as its inference server calls them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.azureml import PACKAGES
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from serve_app.errors import InvalidArchive
from serve_app.model_store.archive import Archive
from serve_app.model_store.model_check import check_model

JSON = "application/json"
# After "Use a dictionary to parse requests" and the like in Microsoft's documentation.
SCRIPT = """
    import json
    import os

    import helper

    def init():
        global model
        model = os.environ["AZUREML_MODEL_DIR"]

    def run(raw_data):
        data = json.loads(raw_data)["data"]
        return {"model": model, "result": [helper.double(value) for value in data]}
"""
RAW = """
    from {package}.aml_request import AMLRequest, rawhttp
    from {package}.aml_response import AMLResponse

    def init():
        pass

    @rawhttp
    def run(request):
        if request.method == "GET":
            return AMLResponse(request.full_path, 200)
        if "image" in request.files:
            return AMLResponse({{"size": len(request.files["image"].read())}}, 200, json_str=True)
        if request.headers.get("x-fail"):
            return AMLResponse("busy", 503, {{"retry-after": "3"}})
        return AMLResponse(request.get_data(False), 201, {{"Content-Type": "image/png"}})
"""


class Script:
    """A loaded script; ``send`` returns the response to one request and its headers and status."""

    def __init__(self, folder: Path) -> None:
        self.entry = handlers.load("azureml", folder, {})
        self.context = Context("m", str(folder), None)
        self.entry.initialize(self.context)

    def send(self, row: dict[str, Any], content_type: str = JSON, **headers: str) -> Any:
        self.context.begin(["id"], [{"content-type": content_type, **headers}], [{}])
        [answer] = self.entry([row], self.context)
        return answer

    @property
    def head(self) -> tuple[int, dict[str, str]]:
        return self.context.get_response_status(0)[0], self.context.get_response_headers(0)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Script]]:
    """Return ``load(source, entry)``, which loads a script in the model's folder."""
    monkeypatch.setenv("AZUREML_MODEL_DIR", "/models/m/1")

    def run(source: str = SCRIPT, entry: str = "score.py") -> Script:
        monkeypatch.setenv("AZUREML_ENTRY_SCRIPT", f"onlinescoring/{entry}")
        (tmp_path / entry).write_text(textwrap.dedent(source))
        (tmp_path / "helper.py").write_text("def double(value):\n    return value * 2\n")
        return Script(tmp_path)

    modules = set(sys.modules)
    yield run
    for name in set(sys.modules) - modules:
        if name.startswith("azureml"):
            del sys.modules[name]


def test_run_gets_the_text_and_its_value_is_written_as_json(load: Callable[..., Script]) -> None:
    script = load()
    answer = script.send({"body": bytearray(b'{"data": [1, 2]}')})
    assert json.loads(answer) == {"model": "/models/m/1", "result": [2, 4]}
    assert script.head == (200, {"content-type": JSON, "x-ms-run-function-failed": "False"})


@pytest.mark.parametrize(
    ("status", "expected"), [(404, 404), (200, 500), (0, 500), (None, 500), ("404", 500), (9999, 500)]
)
def test_an_exception_has_the_status_of_an_error(
    load: Callable[..., Script], status: object, expected: int
) -> None:
    source = f"""
        def init(): pass

        def run(raw_data):
            error = RuntimeError("wrong")
            error.status_code = {status!r}
            raise error
    """
    error = load(source).send({"body": b"a"})
    assert (error.error_code, error.message) == (expected, "RuntimeError: wrong")


def test_a_parameter_of_too_many_levels_is_a_text(load: Callable[..., Script]) -> None:
    script = load("def init(): pass\ndef run(raw_data): return raw_data\n")
    for deep in (b"[" * 200_000, b"[" * 300 + b"]" * 300):
        assert json.loads(json.loads(script.send({"a": deep, "body": b""}))) == {"a": deep.decode()}


def test_a_text_is_a_json_text_and_none_an_empty_object(load: Callable[..., Script]) -> None:
    script = load("def init(): pass\ndef run(raw_data): return raw_data or None\n")
    assert script.send({"body": b"a"}) == b'"a"'
    assert script.send({"body": b""}) == b"{}"
    query = {"a": b"1", "data": b"[1, 2]", "c": b"text"}
    assert json.loads(json.loads(script.send({**query, "body": b""}))) == {
        "a": 1,
        "data": [1, 2],
        "c": "text",
    }


@pytest.mark.parametrize(
    ("row", "content_type", "status"),
    [
        ({"body": b"{"}, JSON, 500),  # the script's own error
        ({"body": b"\xff"}, JSON, 400),
        ({"image": b"x"}, "multipart/form-data; boundary=b", 415),
    ],
)
def test_an_invalid_request_is_that_row_s_error(
    load: Callable[..., Script], row: dict[str, Any], content_type: str, status: int
) -> None:
    error = load().send(row, content_type)
    assert isinstance(error, PredictionException) and error.error_code == status


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        ({}, {}),
        (
            {"x-ms-client-request-id": "a"},
            {"x-ms-client-request-id": "a", "x-ms-request-id": "a"},
        ),
        ({"X-Ms-Request-Id": "b"}, {"x-ms-client-request-id": "b", "x-ms-request-id": "b"}),
        (
            {"x-ms-client-request-id": "a", "x-ms-request-id": "b"},
            {"x-ms-client-request-id": "a", "x-ms-request-id": "b"},
        ),
        ({"x-ms-client-request-id": "a" * 101}, {}),
    ],
)
def test_the_ids_of_a_client_are_sent_back(
    load: Callable[..., Script], sent: dict[str, str], returned: dict[str, str]
) -> None:
    script = load("def init(): pass\ndef run(data): return data")
    script.send({"body": b"1"}, **sent)
    _, headers = script.head
    assert {name: value for name, value in headers.items() if name.endswith("request-id")} == returned


@pytest.mark.parametrize("package", PACKAGES)
def test_a_raw_request_sets_status_and_headers(load: Callable[..., Script], package: str) -> None:
    script = load(RAW.format(package=package), f"{package.partition('.')[0]}_raw.py")
    assert script.send({"body": b"\x00png"}, "image/png") == b"\x00png"
    status, headers = script.head
    assert (status, headers["content-type"]) == (201, "image/png")
    assert script.send({"a": b"1", "body": b""}) == b"/score?a=1"
    assert json.loads(script.send({"image": b"four"}, "multipart/form-data; boundary=b")) == {"size": 4}
    assert script.send({"body": b"x"}, **{"x-fail": "1"}) == b"busy"
    status, headers = script.head
    assert (status, headers["retry-after"], headers["x-ms-run-function-failed"]) == (503, "3", "True")


def test_headers_are_passed_where_run_takes_them(load: Callable[..., Script]) -> None:
    script = load("def init(): pass\ndef run(data, request_headers): return request_headers['x-a'] + data\n")
    assert script.send({"body": b"b"}, **{"x-a": "a"}) == b'"ab"'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def run(data): pass", "no function init in it"),
        ("x = 1", "no function init and no run in it"),
        ("def init(): pass\ndef run(): pass", "run needs a parameter"),
        ("def init(): pass\ndef run(*data): pass", "run needs a parameter"),
        ("import nothing_of_this_name", "importing it failed with ModuleNotFoundError"),
    ],
)
def test_a_script_that_cannot_be_called_is_refused(
    load: Callable[..., Script], source: str, message: str
) -> None:
    with pytest.raises(HandlerLoadError, match=message):
        load(source)


def test_a_script_below_the_app_root_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., Script]
) -> None:
    root = tmp_path / "app"
    (root / "code").mkdir(parents=True)
    (root / "code/entry.py").write_text("def init(): pass\ndef run(data): return data\n")
    monkeypatch.setenv("AML_APP_ROOT", str(root))
    monkeypatch.setenv("AZUREML_ENTRY_SCRIPT", "code/entry.py")
    assert Script(tmp_path).send({"body": b"x"}) == b'"x"'
    monkeypatch.setenv("AZUREML_ENTRY_SCRIPT", "code/none.py")
    with pytest.raises(HandlerLoadError, match="AZUREML_ENTRY_SCRIPT names the script"):
        Script(tmp_path)


@pytest.mark.parametrize(
    ("handler", "file", "found"),
    [
        ("azureml", "score.py", "azureml"),
        ("hf_endpoint", "handler.py", "hf_endpoint"),
        ("hf_endpoint", "modeling.py", "huggingface"),
        ("sagemaker", "code/inference.py", "sagemaker"),
    ],
)
def test_a_script_takes_precedence_over_a_model_folder_and_needs_trust(
    tmp_path: Path, handler: str, file: str, found: str
) -> None:
    for name in ("config.json", "model.safetensors", file, str(Path(file).parent / "requirements.txt")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    archive = Archive.read(tmp_path, "m", handler)
    assert archive.manifest.handler == found
    assert archive.manifest.requirements_file == str(Path(file).parent / "requirements.txt")
    if found == handler:
        with pytest.raises(InvalidArchive, match="runs code of the model's directory"):
            check_model(archive)
        assert check_model(archive, trusted=True).trusted


# What the package inference-schema has of a decorated function; it does not install beside our packages.
SCHEMA_UTIL = """
    def is_schema_decorated(run):
        return hasattr(run, "schemas")

    def get_input_schema(run):
        return run.schemas[0]

    def get_output_schema(run):
        return run.schemas[1]

    def get_supported_versions(run):
        return ["3.0", "3.1"]
"""
DECORATED = """
    import datetime

    def init():
        pass

    def run(data):
        return data

    example = {"data": [1.5], "when": datetime.date(2024, 1, 2)}
    run.schemas = ({"type": "object", "example": example}, {"type": "array", "items": {"type": "number"}})
"""


def test_the_schemas_of_decorators_and_the_authors_documents_are_declared(
    load: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    package = tmp_path / "installed/inference_schema"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "schema_util.py").write_text(textwrap.dedent(SCHEMA_UTIL))
    monkeypatch.syspath_prepend(package.parent)
    files = {"swagger2.json": '{"swagger": "2.0"}', "swagger3.json": "[", "swagger3.1.json": "1"}
    files["swagger.json"] = '{"a":' + "[" * 300 + "]" * 300 + "}"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    schemas = load(DECORATED).entry.instance.schemas
    example = {"data": [1.5], "when": "2024-01-02"}
    assert schemas["input"] == {
        "mediaType": "application/json",
        "schema": {"type": "object", "example": example},
    }
    assert schemas["output"]["schema"]["type"] == "array" and schemas["versions"] == ["3.0", "3.1"]
    assert schemas["documents"] == {"2.0": {"swagger": "2.0"}}
    assert caplog.text.count("it is not used for /swagger.json") == 3
    for name in [name for name in sys.modules if name.startswith("inference_schema")]:
        del sys.modules[name]


def test_a_script_without_decorators_declares_nothing(load: Callable[..., Script]) -> None:
    assert load("def init(): pass\ndef run(data): return data").entry.instance.schemas is None
