"""Tests of BaseHandler's stages, errors, explanations and metrics."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.base import BaseHandler
from handlers.context import Context
from handlers.errors import PredictionException
from handlers.loading.module_loader import add_archive_to_path

pytestmark = pytest.mark.integration


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 10.0]))

    def forward(self, x):
        return x * self.scale
"""
EMBEDDING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding.from_pretrained(torch.tensor([[0.5], [1.5], [2.5]]))

    def forward(self, x):
        return self.words(x)[..., 0]
"""


class MetricRecorder:
    """Metrics that record what a handler adds."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Any, ...]] = []

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms") -> None:
        self.recorded.append((name, value, idx, unit))


def initialize(handler: BaseHandler, directory: Path, config: dict[str, Any] | None = None) -> Context:
    add_archive_to_path(directory)
    context = Context("net", str(directory), {"model": {"modelFile": "model.py"}}, model_yaml_config=config)
    handler.initialize(context)
    return context


@pytest.fixture
def handle(archive: Callable[..., Path], begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """Return ``run(bodies, handler, source, **headers)``, which returns the values for the rows' bodies."""

    def run(
        bodies: list[Any], handler: BaseHandler | None = None, source: str = MODEL, **headers: str
    ) -> list[Any]:
        handler = handler or BaseHandler()
        context = initialize(handler, archive(model=source))
        return handler.handle([{"body": body} for body in bodies], begin(context, len(bodies), **headers))

    return run


def test_lists_of_numbers_are_multiplied(handle: Any) -> None:
    assert handle([[1.0, 2.0], [3.0, 4.0]]) == [[1.0, 20.0], [3.0, 40.0]]


@pytest.mark.parametrize("body", [b"[1, 2]", bytearray(b"[1.0, 2.0]"), "[1, 2]"])
def test_json_text_is_parsed(handle: Any, body: Any) -> None:
    assert handle([body]) == [[1.0, 20.0]]


def test_the_field_data_takes_precedence_over_the_body(archive: Any, begin: Any) -> None:
    handler = BaseHandler()
    context = initialize(handler, archive(model=MODEL))
    assert handler.handle([{"data": [1, 1], "body": [9, 9]}], begin(context)) == [[1.0, 10.0]]
    assert handler.handle([[1, 1]], begin(context)) == [[1.0, 10.0]], (
        "rows may be the bare values of an envelope"
    )
    assert handler.handle(torch.ones(2, 2), begin(context, 2)) == [[1.0, 10.0]] * 2


def test_integers_become_floats_except_for_embeddings(handle: Any) -> None:
    assert handle([[1, 2]]) == [[1.0, 20.0]]
    assert handle([[2, 0]], source=EMBEDDING) == [[2.5, 0.5]]


def test_inputs_have_the_dtype_of_the_parameters(handle: Any) -> None:
    halved = MODEL.replace("torch.tensor([1.0, 10.0])", "torch.tensor([1.0, 10.0], dtype=torch.bfloat16)")

    class Format(BaseHandler):
        def postprocess(self, data: torch.Tensor) -> list[Any]:
            return [str(data.dtype)] * len(data)

    assert handle([[0.5, 1.5]], Format(), source=halved) == ["torch.bfloat16"]
    assert handle([[0.5, 1.5]], Format()) == ["torch.float32"]


def test_a_torchscript_embedding_keeps_its_indices(tmp_path: Path, begin: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Sequential(torch.nn.Embedding(3, 2))).save(str(tmp_path / "model.pt"))
    manifest = {"model": {"serializedFile": "model.pt"}}
    context = Context("words", str(tmp_path), manifest)
    handler = BaseHandler()
    handler.initialize(context)
    [[first, second, third]] = handler.handle([{"body": [1, 2, 1]}], begin(context))
    assert first == third != second


def test_a_batch_returns_the_values_of_its_rows(handle: Any) -> None:
    rows = [[float(i), 0.5 * i] for i in range(8)]
    assert handle(rows) == [handle([row])[0] for row in rows]


def test_an_invalid_row_fails_alone(handle: Any) -> None:
    good, bad, third = handle([[1, 2], b"not json", [3, 4]])
    assert (good, third) == ([1.0, 20.0], [3.0, 40.0])
    assert (
        isinstance(bad, PredictionException)
        and bad.error_code == 400
        and "JSON list of numbers" in bad.message
    )


def test_every_invalid_row_has_its_own_error(handle: Any) -> None:
    first, second = handle([b"not json", ["a", "b"]])
    assert first.error_code == second.error_code == 400 and first.message != second.message
    [none] = handle([None])
    assert none.error_code == 400


def test_reject_raises_outside_of_handle() -> None:
    with pytest.raises(PredictionException, match="No"):
        BaseHandler().reject(0, PredictionException("No", 400))
    with pytest.raises(PredictionException, match="JSON list"):
        BaseHandler().preprocess([{"body": [1]}, {"body": b"not json"}])


def test_rejected_rows_stay_in_the_batch(handle: Any) -> None:
    class Rejecter(BaseHandler):
        def preprocess(self, data: list[Any]) -> torch.Tensor:
            for index, row in enumerate(data):
                if row["body"][0] < 0:
                    self.reject(index, PredictionException("Not below zero", 422))
            return super().preprocess(data)

        def postprocess(self, data: torch.Tensor) -> list[Any]:
            return [len(data)] * len(data)

    answers = handle([[1, 2], [-1, 2], [3, 4]], Rejecter())
    assert answers[0] == answers[2] == 3
    assert answers[1].message == "Not below zero"


def test_an_exception_in_a_rows_place_is_returned(handle: Any) -> None:
    class Strict(BaseHandler):
        def postprocess(self, data: torch.Tensor) -> list[Any]:
            return [KeyError("large") if row[1] > 30 else "fine" for row in data]

    fine, large = handle([[1, 2], [3, 4]], Strict())
    assert fine == "fine" and isinstance(large, KeyError)


def test_an_error_of_the_whole_batch_is_raised(handle: Any) -> None:
    class Closed(BaseHandler):
        def inference(self, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise PredictionException("Closed on Sundays", 503)

    with pytest.raises(PredictionException, match="Closed on Sundays"):
        handle([[1, 2], b"not json"], Closed())


def test_subclasses_find_torchserves_attributes(archive: Any) -> None:
    handler = BaseHandler()
    assert handler.initialized is False and handler.profiler_args == {} and handler.target == 0
    directory = archive(model=MODEL)
    context = initialize(handler, directory, {"handler": {"depth": 2}})
    assert handler.initialized and handler.context is context and handler.manifest is context.manifest
    assert handler.device == handler.get_device() == torch.device("cpu") and handler.map_location == "cpu"
    assert handler.model_pt_path is None and handler.mapping is None and handler.explain is False
    assert handler.model_yaml_config == {"handler": {"depth": 2}}


def test_a_subclass_may_override_the_loading_of_weights(archive: Any, begin: Any) -> None:
    class CustomLoader(BaseHandler):
        def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
            return torch.nn.Identity()

    handler = CustomLoader()
    context = initialize(handler, archive(model=MODEL))
    assert handler.handle([{"body": [1, 2]}], begin(context)) == [[1, 2]]


def test_outputs_have_no_gradients(handle: Any) -> None:
    class Inspector(BaseHandler):
        def postprocess(self, data: torch.Tensor) -> list[Any]:
            return [data.requires_grad, data.is_inference()][: len(data)]

    assert handle([[1, 2], [1, 2]], Inspector()) == [False, True]


class Explains(BaseHandler):
    def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any) -> list[Any]:
        return [{"target": target, "sum": float(row.sum()), "raw": raw_data} for row in tensor_data]


def test_explanations_have_a_target_for_each_row(archive: Any, begin: Any) -> None:
    handler = Explains()
    context = initialize(handler, archive(model=MODEL))
    rows = [{"data": [1, 2], "target": b"1"}, {"data": [3, 4]}, {"data": [5, 6], "target": "gender"}]
    assert handler.handle(rows, begin(context, 3, explain="True")) == [
        {"target": "1", "sum": 3.0, "raw": [1, 2]},
        {"target": 0, "sum": 7.0, "raw": [3, 4]},
        {"target": "gender", "sum": 11.0, "raw": [5, 6]},
    ]
    assert handler.explain is True
    assert [
        explanation["sum"] for explanation in handler.handle(rows[1:2] * 2, begin(context, 2, explain="True"))
    ] == [
        7.0,
        7.0,
    ]
    assert handler.handle(rows[:1], begin(context, 1, explain="False")) == [[1.0, 20.0]]
    assert handler.explain is False


def test_a_handler_without_insights_answers_501(handle: Any) -> None:
    with pytest.raises(PredictionException, match="BaseHandler cannot be explained") as raised:
        handle([[1, 2]], explain="True")
    assert raised.value.error_code == 501


def test_describe_handle_answers_every_row(handle: Any) -> None:
    class Described(BaseHandler):
        def describe_handle(self) -> Any:
            return {"inputs": 2}

    assert handle([[1, 2]], Described(), describe="True") == [{"inputs": 2}]
    assert handle([None, None], describe="True") == [None, None]


def test_times_are_reported_if_metrics_exist(archive: Any, begin: Any) -> None:
    handler = BaseHandler()
    context = initialize(handler, archive(model=MODEL))
    context.metrics = MetricRecorder()
    handler.handle([{"body": [1, 2]}], begin(context))
    [(name, value, idx, unit)] = context.metrics.recorded
    assert (name, idx, unit) == ("HandlerTime", None, "ms") and 0 <= value < 60_000
    context.model_yaml_config["handler"] = {"profile": True}
    context.metrics = MetricRecorder()
    handler.handle([{"body": [1, 2]}], begin(context))
    names = [recorded[0] for recorded in context.metrics.recorded]
    assert names == ["ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess", "HandlerTime"]
    context.metrics = None
    assert handler.handle([{"body": [1, 2]}], begin(context)) == [[1.0, 20.0]]


def test_a_batch_is_profiled(handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "TRUE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert handle([[1, 2]]) == [[1.0, 20.0]]
    [trace] = (tmp_path / "pytorch_profiler" / "net").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"preprocess", "inference", "postprocess"} <= names

    profiles = []
    handler = BaseHandler()
    handler.profiler_args = {
        "on_trace_ready": profiles.append,
        "activities": [torch.profiler.ProfilerActivity.CPU],
    }
    handle([[1, 2]], handler)
    assert len(profiles) == 1
