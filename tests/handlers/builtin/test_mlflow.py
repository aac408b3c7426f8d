"""Model directories of MLflow behind its scoring protocol; the models are saved by MLflow itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import onnx
import pandas as pd
import pytest
from mlflow.models import infer_signature

import handlers
from handlers.builtin.mlflow import MLflowHandler
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from serve_app.errors import InvalidArchive
from serve_app.model_store.archive import Archive
from serve_app.model_store.model_check import check_model

MODEL = """
import mlflow

class Double(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return (model_input["a"] * 2 + (params or {}).get("plus", 0)).tolist()

mlflow.models.set_model(Double())
"""
Send = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's hints for authors of models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mlflow")
    (place / "double.py").write_text(MODEL)
    signature = infer_signature(pd.DataFrame({"a": [1.0]}), [1.0], params={"plus": 0})
    source = str(place / "double.py")
    mlflow.pyfunc.save_model(
        place / "model", python_model=source, signature=signature, pip_requirements=["pandas"]
    )
    return place / "model"


@pytest.fixture
def send(folder: Path, begin: Callable[..., Context]) -> Send:
    context = Context("m", str(folder), {"model": {}})
    handler = MLflowHandler()
    handler.initialize(context)

    def run(body: Any, content_type: str = "application/json") -> Any:
        begin(context, 1, **{"Content-Type": content_type})
        [answer] = handler.handle([{"body": body}], context)
        return answer if isinstance(answer, PredictionException) else json.loads(answer)

    return run


@pytest.mark.parametrize(
    ("document", "predictions"),
    [
        ({"dataframe_split": {"columns": ["a"], "data": [[1.0], [2.5]]}}, [2.0, 5.0]),
        ({"dataframe_split": {"index": [7], "columns": ["a"], "data": [[1.0]]}}, [2.0]),
        ({"dataframe_records": [{"a": 3.0}]}, [6.0]),
        ({"instances": [{"a": 1.0}]}, [2.0]),
        ({"inputs": {"a": [1.0, 2.0]}}, [2.0, 4.0]),
        ({"dataframe_records": [{"a": 3.0, "input_data": 1}]}, [6.0]),
        ({"dataframe_records": [{"a": 3.0}], "params": {"plus": 5}}, [11.0]),
    ],
)
def test_the_four_forms_of_json(send: Send, document: Any, predictions: Any) -> None:
    assert send(json.dumps(document).encode()) == {"predictions": predictions}
    assert send(document) == {"predictions": predictions}, "as decoded by the server"


@pytest.mark.parametrize(
    ("data", "predictions"),
    [
        ({"columns": ["a"], "index": [0, 1], "data": [[1.0], [2.0]]}, [2.0, 4.0]),
        ({"a": [1.0]}, [2.0]),
    ],
)
def test_the_form_of_azure_is_answered_by_bare_predictions(send: Send, data: Any, predictions: Any) -> None:
    assert send({"input_data": data}) == predictions
    assert send({"input_data": data, "params": {"plus": 1}}) == [value + 1 for value in predictions]


def test_instances_of_vertex_are_those_of_mlflow(folder: Path, begin: Callable[..., Context]) -> None:
    entry = handlers.load("mlflow", folder, {})
    entry.initialize(context := Context("m", str(folder), {"model": {}}))
    requests = [
        {"instances": [{"a": 1.0}, {"a": 2.0}], "parameters": {"plus": 1}},
        {"instances": [{"a": 3.0}]},
        {"instances": [{"b": 3.0}]},
        {"inputs": {"a": [4.0]}},
    ]
    begin(context, len(requests), **{"Content-Type": "application/json"})
    envelope = handlers.load_envelope("vertex")(entry)
    first, second, error, raw = envelope.handle([{"body": request} for request in requests], context)
    answers = [json.loads(answer)["predictions"] for answer in (first, second, raw)]
    assert answers == [[3.0, 5.0], [6.0], [8.0]]
    assert isinstance(error, PredictionException) and error.error_code == 400


def test_csv(send: Send) -> None:
    assert send(b"a\n1\n2.5\n", "text/csv") == {"predictions": [2.0, 5.0]}


@pytest.mark.parametrize(
    ("body", "content_type", "status", "words"),
    [
        (b"{bad", "application/json", 400, "valid JSON"),
        (b'{"input_data": ', "application/json", 400, "valid JSON"),
        (b'{"a": "input_data"}', "application/json", 400, "exactly one of the input fields"),
        (b'{"input_data": {"b": [1.0]}}', "application/json", 400, "missing inputs ['a']"),
        (b"[1]", "application/json", 400, "exactly one of the input fields"),
        (b'{"inputs": {"a": [1]}, "instances": [1]}', "application/json", 400, "exactly one"),
        (b'{"inputs": {"b": [1.0]}}', "application/json", 400, "missing inputs ['a']"),
        (b'{"dataframe_records": [{"a": "x"}]}', "application/json", 400, "a"),
        (b"x", "text/plain", 415, "only supports"),
        (b"{}", "application/json; charset=latin-1", 415, "UTF-8"),
        (b"\xff\xfe", "text/csv", 400, "UTF-8"),
    ],
)
def test_an_invalid_body_is_refused(
    send: Send, body: bytes, content_type: str, status: int, words: str
) -> None:
    error = send(body, content_type)
    assert isinstance(error, PredictionException)
    assert error.error_code == status and words in error.message


def test_a_graph_is_served_by_its_flavour(tmp_path: Path, begin: Callable[..., Context]) -> None:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    mlflow.onnx.save_model(model, tmp_path / "model", pip_requirements=["onnxruntime"])
    context = Context("m", str(tmp_path / "model"), {"model": {}})
    handler = MLflowHandler()
    handler.initialize(context)
    begin(context, 1, **{"Content-Type": "application/json"})
    [answer] = handler.handle([{"body": b'{"inputs": {"x": [[1.5]]}}'}], context)
    assert json.loads(answer)["predictions"] == {"y": [[3.0]]}


def test_a_directory_is_recognised_and_needs_trust(folder: Path) -> None:
    archive = Archive.read(folder, "model")
    assert (archive.manifest.handler, archive.manifest.requirements_file) == ("mlflow", "requirements.txt")
    with pytest.raises(
        InvalidArchive, match="runs code of the model's directory; register it with trusted=true"
    ):
        check_model(archive)
    assert check_model(archive, trusted=True).trusted


def test_a_missing_package_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(HandlerLoadError, match=r"pip install 'torchrelay\[mlflow\]'"):
        MLflowHandler().initialize(Context("m", str(folder), {"model": {}}))
