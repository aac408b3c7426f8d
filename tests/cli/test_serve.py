"""`torchrelay serve`: errors before a start, and a real server with its reloads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.commands.serve import build_curl
from serve_app.cli.reload_reports import ReloadReports
from serve_app.model_store.archiver import ArchiverError
from serve_app.model_store.served_target import read_target
from tests.support.hf_folders import save_bert, save_byte_llama
from tests.support.ports import free_port

MODEL = """
from pydantic import BaseModel

class Mail(BaseModel):
    text: str

class Model:
    def predict(self, request: Mail) -> dict:
        return {"spam": "prize" in request.text}
"""


def test_the_curl_command_has_an_example() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    schemas = {"input": {"mediaType": "application/json", "schema": schema}}
    assert build_curl("http://h/m", schemas) == (
        """curl http://h/m -H 'content-type: application/json' -d '{"text": "text"}'"""
    )
    text = build_curl("http://h/m", {"input": {"mediaType": "text/plain", "schema": {}}})
    assert text == "curl http://h/m -H 'content-type: text/plain' -d 'some text'"
    assert build_curl("http://h/m", None) == "curl http://h/m -T FILE"
    assert build_curl("http://h/m", None, "text/plain").endswith("-d 'some text'")
    assert build_curl("http://h/m", None, "image/*") == "curl http://h/m -T IMAGE"
    assert '{"prompt": "Once upon a time", "max_new_tokens": 32}' in build_curl("http://h/m", None, "", "llm")
    assert '{"messages": [{"role": "user"' in build_curl("http://h/m", None, "", "image_text_to_text")


@pytest.mark.integration
def test_a_folder_of_a_language_model_gets_openai_api(tmp_path: Path) -> None:
    language_model = save_byte_llama(tmp_path / "llama")
    assert read_target(str(language_model)).handler == "llm"
    assert read_target(str(language_model / "model.safetensors")).handler == "llm"
    assert read_target(str(language_model), handler="causal_lm").handler == "causal_lm"
    assert read_target(str(save_bert("BertModel", tmp_path / "bert"))).handler == ""
    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(ArchiverError, match="--handler is for archives and model folders"):
        read_target(str(tmp_path / "model.py"), handler="llm")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "source", "message"),
    [
        (
            ["model.py"],
            "class Model:\n    def predict(self): pass",
            "line 2: Model.predict takes 0",
        ),
        (["model.py"], "import absent_package", "line 1: importing it failed with ModuleNotFoundError"),
        (["model.py:Other"], MODEL, "there is no function or class 'Other'"),
        (["absent.py"], MODEL, "absent.py does not exist"),
        (
            ["model.py", "--reload"],
            "def handle(data, context): return data",
            "only a Python file with a model class can be reloaded",
        ),
    ],
)
def test_an_invalid_target_ends_the_command_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(source)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / ".torchrelay").exists()


@pytest.mark.integration
def test_reports_of_several_replicas_are_printed_once(tmp_path: Path) -> None:
    output = StringIO()
    file = tmp_path / "reports"
    reports = ReloadReports(file, Console(file=output, width=200))
    line = '{"ok": %s, "seconds": 0.25, "message": "%s", "kept": %s, "pid": 1, "time": 1.0, "revision": %d}\n'
    with file.open("a") as lines:
        lines.write(line % ("true", "watching", "[]", 0))
        lines.write(2 * (line % ("true", "", '["weights"]', 1)))
        lines.write(line % ("true", "", '["weights"]', 2))
        lines.write(line % ("false", "model.py, line 3: SyntaxError: invalid syntax", "[]", 3))
    deadline = time.monotonic() + 30
    while "line 3" not in output.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reports.close()
    assert output.getvalue().count("Reloaded in 0.25 s, with weights kept") == 2
    assert "Not reloaded" in output.getvalue()
    assert "watching" not in output.getvalue()


class ServeProcess:
    """The command in a folder of its own, with its output in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.port = folder, free_port()
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve_app.cli", "serve", *arguments, "--port", str(self.port)],
                cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()), "COLUMNS": "200"},
            )  # fmt: skip
        self.wait_for("Try it:")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def predict(self, text: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/predictions/spam"
        return httpx.post(url, json={"text": text}, timeout=60)

    def close(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    (tmp_path / "spam.py").write_text(MODEL)
    process = ServeProcess(tmp_path, "spam.py", "--reload")
    try:
        yield process
    finally:
        process.close()


@pytest.mark.slow
def test_a_file_is_served_edited_and_joined_by_another(served: ServeProcess) -> None:
    file = served.folder / "spam.py"
    assert served.predict("a prize").json() == {"spam": True}
    assert served.predict("").status_code == 200
    invalid = httpx.post(f"http://127.0.0.1:{served.port}/predictions/spam", json={}, timeout=60)
    assert (invalid.status_code, "text: Field required" in invalid.text) == (400, True)
    management = f"http://127.0.0.1:{served.port + 1}"
    (described,) = httpx.get(f"{management}/models/spam", timeout=60).json()
    assert described["inputType"] == "application/json"
    assert described["schemas"]["input"]["schema"]["required"] == ["text"]
    metadata = httpx.get(f"http://127.0.0.1:{served.port}/v2/models/spam", timeout=60).json()
    assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [1]}]
    document = httpx.options(f"http://127.0.0.1:{served.port}/predictions/spam", timeout=60).json()
    assert "requestBody" in document["paths"]["/predictions/spam"]["post"]
    assert httpx.get(f"{management}/ui", follow_redirects=True, timeout=60).status_code == 200

    file.write_text(MODEL.replace('"spam":', '"junk":'))
    served.wait_for("Reloaded in")
    assert served.predict("a prize").json() == {"junk": True}
    file.write_text(MODEL.replace("def predict(", "def predict(("))
    served.wait_for("Not reloaded")
    assert "spam.py, line 8: SyntaxError" in served.output
    assert served.predict("a prize").json() == {"junk": True}

    (served.folder / "upper.py").write_text(
        "class Model:\n    def predict(self, text: str) -> str:\n        return text.upper()\n"
    )
    command = [sys.executable, "-m", "serve_app.cli", "serve", "upper.py", "--port", str(served.port)]
    for expected in ("1.0", "2.0"):  # the second one is a new version, and the default
        joined = subprocess.run(command, cwd=served.folder, capture_output=True, text=True, timeout=120)
        assert joined.returncode == 0, joined.stdout + joined.stderr
        assert f"Its default version is now {expected}; `torchrelay models` changes" in joined.stdout
        assert "Ctrl-C" not in joined.stdout
        answer = httpx.post(
            f"http://127.0.0.1:{served.port}/predictions/upper",
            content="a",
            headers={"content-type": "text/plain"},
            timeout=60,
        )
        assert (answer.text, answer.headers["x-model-version"]) == ("A", expected)
    command = [sys.executable, "-m", "serve_app.cli", "serve", "upper.py", "--port", str(served.port)]
    (other := served.folder / "other").mkdir()
    (served.folder / "upper.py").rename(other / "upper.py")
    refused = subprocess.run(command, cwd=other, capture_output=True, text=True, timeout=120)
    ended = f"End that server of Torchrelay by `cd {served.folder} && torchrelay stop {served.folder}/"
    assert ended in " ".join(refused.stderr.split()), refused.stderr
    assert served.close() == 0
