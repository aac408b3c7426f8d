"""The handler of Hugging Face's custom handlers: ``EndpointHandler`` as the Inference Endpoints call it."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from serve_app.model_store.archive import Archive

JSON = "application/json"
# After "Create custom Inference Handler" in Hugging Face's documentation.
SCRIPT = """
    from typing import Any, Dict, List

    import numpy as np
    import torch
    from PIL import Image

    class EndpointHandler:
        def __init__(self, path=""):
            self.path = path

        def __call__(self, data: Dict[str, Any]) -> List[Dict[str, Any]]:
            inputs = data.pop("inputs", data)
            parameters = data.pop("parameters", {})
            if isinstance(inputs, Image.Image):
                return inputs.rotate(90, expand=True)
            if inputs == "fail":
                raise KeyError("a label")
            if inputs == "bytes":
                return b"RIFF"
            if inputs == "set":
                return {1, 2}
            return [{"path": self.path, "inputs": inputs if isinstance(inputs, str) else len(inputs),
                     "score": np.float32(0.5), "tensor": torch.ones(2), **parameters}]
"""


class Endpoint:
    """A loaded ``handler.py``."""

    def __init__(self, folder: Path) -> None:
        self.entry = handlers.load("hf_endpoint", folder, {})
        self.context = Context("m", str(folder), None)
        self.entry.initialize(self.context)

    def send(self, body: Any, content_type: str = JSON, accept: str = "*/*", **query: bytes) -> Any:
        self.context.begin(["id"], [{"content-type": content_type, "accept": accept}], [{}])
        [answer] = self.entry([{"body": body, **query}], self.context)
        return answer

    @property
    def content_type(self) -> str | None:
        return self.context.get_response_content_type(0)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Endpoint]:
    def run(source: str = SCRIPT) -> Endpoint:
        (tmp_path / "handler.py").write_text(textwrap.dedent(source))
        return Endpoint(tmp_path)

    return run


def test_a_handler_gets_inputs_and_parameters(load: Callable[..., Endpoint], tmp_path: Path) -> None:
    endpoint = load()
    [answer] = json.loads(endpoint.send(b'{"inputs": "a", "parameters": {"k": 1}}'))
    assert answer == {"path": str(tmp_path), "inputs": "a", "score": 0.5, "tensor": [1.0, 1.0], "k": 1}
    assert endpoint.content_type == JSON
    query = {"k": b"2", "flag": b"true", "rate": b"0.5", "name": b"x"}
    [answer] = json.loads(endpoint.send({"inputs": "a"}, **query))
    assert [answer[name] for name in query] == [2, True, 0.5, "x"]
    [answer] = json.loads(endpoint.send(b'{"inputs": "a", "parameters": {"k": 1}}', k=b"2"))
    assert answer["k"] == 1


def test_a_body_of_another_type_is_the_input(load: Callable[..., Endpoint]) -> None:
    endpoint = load()
    assert json.loads(endpoint.send(b"text", "text/plain"))[0]["inputs"] == "text"
    assert json.loads(endpoint.send(bytearray(b"abc"), "audio/flac"))[0]["inputs"] == 3
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "PNG")
    for accept, kind in (("image/jpeg", "JPEG"), ("*/*", "PNG")):
        answer = endpoint.send(file.getvalue(), "image/png", accept)
        image = Image.open(io.BytesIO(answer))
        assert (image.size, image.format, endpoint.content_type) == ((2, 4), kind, f"image/{kind.lower()}")
    assert endpoint.send(b'{"inputs": "bytes"}', accept="audio/wav") == b"RIFF"
    assert endpoint.content_type == "audio/wav"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{", JSON, "not JSON"),
        (b"[1]", JSON, "an object with inputs"),
        (b'{"text": "a"}', JSON, "an object with inputs"),
        (b"no image", "image/png", "image"),
        (b'{"inputs": "fail"}', JSON, "KeyError: 'a label'"),
        (b'{"inputs": "set"}', JSON, "returned a value without JSON: .*set"),
        (None, "multipart/form-data", "The body is empty, or a form"),
    ],
)
def test_an_error_is_400_as_on_the_platform(
    load: Callable[..., Endpoint], body: Any, content_type: str, message: str
) -> None:
    error = load().send(body, content_type)
    assert isinstance(error, PredictionException) and error.error_code == 400
    with pytest.raises(PredictionException, match=message):
        raise error


@pytest.mark.parametrize("source", ["x = 1", "EndpointHandler = 1", "class EndpointHandler: pass"])
def test_a_file_without_the_class_is_refused(load: Callable[..., Endpoint], source: str) -> None:
    with pytest.raises(HandlerLoadError, match="there is no class EndpointHandler in it"):
        load(source)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HandlerLoadError, match=r"no handler\.py in it"):
        Endpoint(tmp_path)


def test_variables_name_another_file_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        class Pipeline:
            def __init__(self, path): pass
            def __call__(self, data): return data["inputs"]
    """
    (tmp_path / "pipeline.py").write_text(textwrap.dedent(source))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert Archive.read(tmp_path, "m", "hf_endpoint").manifest.handler == "huggingface"
    monkeypatch.setenv("HF_DEFAULT_PIPELINE_NAME", "pipeline.py")
    monkeypatch.setenv("HF_MODULE_NAME", "pipeline.Pipeline")
    assert Archive.read(tmp_path, "m", "hf_endpoint").manifest.handler == "hf_endpoint"
    assert Endpoint(tmp_path).send(b'{"inputs": "a"}') == b'"a"'
