"""The contracts against our own inference port in this process, and against servers that differ."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from serve_app.cli import azureml, hf_endpoints
from serve_app.cli.app import app
from serve_app.conformance import CONTRACTS, ServerUnderTest, run
from tests.support.handler_server import serve_handler
from tests.support.http_server import serving
from tests.support.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning")]

READY = {"inference": {"ping": "ready"}, "control": {"load_models": "m"}}
BODIES = {"runtime": {"decode_input_request": False}}
UPPER = """
    def read(row):
        body = row.get("data", row.get("body", row.get("input"))) if isinstance(row, dict) else row
        return body.decode() if isinstance(body, (bytes, bytearray)) else body

    def handle(data, context):
        return [str(read(row)).upper() for row in data] if data else []
"""
SAGEMAKER = """
    def model_fn(model_dir):
        return str.upper

    def input_fn(data, content_type):
        import json
        return json.loads(data)

    def predict_fn(data, model):
        return model(data)
"""
AZUREML = """
    import json

    def init(): pass

    def run(raw_data):
        return json.loads(raw_data).upper()
"""
HF_ENDPOINT = """
    class EndpointHandler:
        def __init__(self, path=""): pass

        def __call__(self, data):
            return [{"label": data["inputs"].upper()}]
"""
MLFLOW = """
    import mlflow

    class Double(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input, params=None):
            return (model_input["a"] * 2).tolist()

    mlflow.models.set_model(Double())
"""
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
Serve = Callable[[Path], contextlib.AbstractContextManager[str]]


def write(folder: Path, file: str, source: str) -> Path:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(textwrap.dedent(source))
    return folder


def serve_upper(folder: Path, **sections: Any) -> contextlib.AbstractContextManager[str]:
    return serve_handler("m", "upper.py", write(folder, "upper.py", UPPER), **sections)


def serve_sagemaker(folder: Path) -> contextlib.AbstractContextManager[str]:
    write(folder, "code/inference.py", SAGEMAKER)
    return serve_handler("m", "sagemaker", folder, **READY, **BODIES)


def serve_azureml(folder: Path) -> contextlib.AbstractContextManager[str]:
    sections = azureml.settings({})
    write(folder, "score.py", AZUREML)
    return serve_handler("m", "azureml", folder, **READY | {"inference": sections["inference"]}, **BODIES)


def serve_hf_endpoint(folder: Path) -> contextlib.AbstractContextManager[str]:
    sections = hf_endpoints.settings({})
    write(folder, "handler.py", HF_ENDPOINT)
    return serve_handler("m", "hf_endpoint", folder, **READY | {"inference": sections["inference"]})


def serve_mlflow(folder: Path) -> contextlib.AbstractContextManager[str]:
    import mlflow
    import pandas as pd

    write(folder, "double.py", MLFLOW)
    signature = mlflow.models.infer_signature(pd.DataFrame({"a": [1.0]}), [1.0])
    source, place = str(folder / "double.py"), folder / "model"
    mlflow.pyfunc.save_model(place, python_model=source, signature=signature, pip_requirements=["pandas"])
    sections = {"inference": {"ping": "ready", "aliases": {"/health": "/ping"}}}
    return serve_handler("m", "mlflow", place, **READY | sections)


def serve_llm(folder: Path) -> contextlib.AbstractContextManager[str]:
    from tests.support.hf_folders import save_byte_llama

    save_byte_llama(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT}))
    return serve_handler("m", "llm", folder)


OURS: Mapping[str, tuple[Serve, Any]] = {
    "kserve-v1": (lambda folder: serve_upper(folder, runtime={"service_envelope": "kserve"}), "a"),
    "kserve-v2": (serve_upper, "a"),
    "openai": (serve_llm, "Once"),
    "sagemaker": (serve_sagemaker, "a"),
    "vertex": (lambda folder: serve_upper(folder, runtime={"service_envelope": "vertex"}, **READY), "a"),
    "mlflow": (serve_mlflow, {"a": [1.0, 2.0]}),
    "azureml": (serve_azureml, "a"),
    "hf-endpoint": (serve_hf_endpoint, "a"),
}


def check(contract: str, url: str, instance: Any) -> list[str]:
    """Return the problems of a server, each after its requirement."""
    with httpx.Client(base_url=url, timeout=60) as client:
        server = ServerUnderTest(client, "m", instance, "/ping", "/invocations")
        return [f"{o.requirement}: {o.problem}" for o in run(contract, server) if o.problem]


@pytest.mark.parametrize("contract", OURS)
def test_our_server_conforms(contract: str, tmp_path: Path) -> None:
    serve, instance = OURS[contract]
    with serve(tmp_path) as url:
        assert check(contract, url, instance) == []


def test_every_contract_is_checked_here_or_against_a_cluster() -> None:
    assert set(CONTRACTS) - set(OURS) == {"sagemaker-multi-model"}, "tests/cluster/test_sagemaker.py"


def answer_with(status: int, body: bytes, content_type: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("content-length") or 0))
        request.send_response(status)
        request.send_header("content-type", content_type)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


@pytest.fixture
def others() -> Iterator[list[str]]:
    """Return the addresses of servers that answer everything alike, and of one that does not answer."""
    answers = [(200, b"{}", "application/json"), (500, b"no", "text/plain"), (200, b"[1]", "text/plain")]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(answer_with(*answer))) for answer in answers]
        yield [*urls, f"http://127.0.0.1:{free_port()}"]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_servers_that_differ_are_found(contract: str, others: list[str]) -> None:
    one, two, three, four = (check(contract, url, {"a": [1.0]}) for url in others)
    assert one and three, "a constant response is not one for each request"
    assert two and len(four) == len(CONTRACTS[contract])
    assert all("ConnectError" in problem for problem in four)
    assert not any("Traceback" in problem for problem in [*one, *two, *three])


def test_the_command(tmp_path: Path, others: list[str]) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["conformance", *words])

    with serve_sagemaker(tmp_path) as url:
        shown = call("sagemaker", "--base-url", url, "--instance", '"a"')
    assert (shown.exit_code, shown.stdout.count("ok ")) == (0, len(CONTRACTS["sagemaker"]))
    failed = call("sagemaker", "--base-url", others[1], "--json")
    assert failed.exit_code == 1 and "GET /ping is 500" in json.loads(failed.stdout)[0]["problem"]
    assert "differs GET /ping" in call("sagemaker", "--base-url", others[1]).stdout
    assert call("none", "--base-url", others[0]).exit_code == 1
    assert call("sagemaker", "--instance", "text").exit_code == 1


def test_the_key_of_a_server_of_this_machine_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = set()

    def answer(request: BaseHTTPRequestHandler) -> None:
        sent.add(request.headers.get("authorization"))
        answer_with(200, b"", "text/plain")(request)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_file.json").write_text('{"inference": {"key": "secret"}}')
    with serving(answer) as url:
        for words in ((), ("--token", "other")):
            CliRunner().invoke(app, ["conformance", "sagemaker", "--base-url", url, *words])
    assert sent == {"Bearer secret", "Bearer other"}
