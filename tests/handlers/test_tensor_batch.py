"""Tests of rows of named arrays: they are joined along the first axis, run together and split again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from handlers import tensor_batch
from handlers.base import BaseHandler
from handlers.context import Context
from handlers.errors import PredictionException


def make_doubling_model(calls: list[int]) -> Any:
    def model(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(len(arrays["x"]) if arrays["x"].ndim else -1)
        return {"y": arrays["x"] * 2}

    return model


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2)), min_size=1, max_size=6))
def test_rows_of_any_size_get_their_own_outputs(shapes: list[tuple[int, int]]) -> None:
    rows = [{"x": np.full(shape, index)} for index, shape in enumerate(shapes)]
    calls: list[int] = []
    answers = tensor_batch.run(rows, make_doubling_model(calls))
    for row, answer in zip(rows, answers):
        np.testing.assert_array_equal(answer["y"], row["x"] * 2)
    assert len(calls) == len({width for _, width in shapes})  # one call for rows that can be joined


def test_rows_that_cannot_be_joined_run_separately() -> None:
    calls: list[int] = []
    rows = [{"x": np.array(1)}, {"x": np.array(2)}, {"x": np.ones(2), "z": np.ones(3)}]
    assert [a["y"].tolist() for a in tensor_batch.run(rows, make_doubling_model(calls))] == [2, 4, [2, 2]]
    assert calls == [-1, -1, 2]
    calls.clear()
    tensor_batch.run([{"x": np.ones(1)}] * 3, make_doubling_model(calls), separately=True)
    assert calls == [1, 1, 1]


def test_rows_run_separately_if_outputs_cannot_be_split() -> None:
    answers = tensor_batch.run(
        [{"x": np.ones(1)}, {"x": np.ones(2)}], lambda arrays: {"sum": arrays["x"].sum()}
    )
    assert [answer["sum"] for answer in answers] == [1, 2]


def test_a_failing_row_fails_alone() -> None:
    def model(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (arrays["x"] < 0).any():
            raise PredictionException("negative", 400)
        return {"y": arrays["x"]}

    first, second = tensor_batch.run([{"x": np.array([1])}, {"x": np.array([-1])}], model)
    assert first["y"].tolist() == [1]
    assert isinstance(second, PredictionException)


def test_tensor_batches_are_recognized() -> None:
    assert tensor_batch.is_tensor_batch([{"x": np.ones(1)}])
    for data in ([], [{}], [{"body": [1.0]}], ["x"]):
        assert not tensor_batch.is_tensor_batch(data)


def begin_batch(handler: BaseHandler, rows: int, config: dict | None = None) -> Context:
    context = Context("m", ".", {}, model_yaml_config=config or {})
    context.begin([str(i) for i in range(rows)], [{}] * rows, [{}] * rows)
    handler.device = torch.device("cpu")
    handler.model_yaml_config = config or {}
    return context


def test_inputs_are_passed_in_the_order_of_the_signature() -> None:
    handler = BaseHandler()
    handler.model = _Subtract()
    ports = {"inputs": [{"name": "a"}, {"name": "b"}], "outputs": [{"name": "difference"}]}
    rows = [{"b": np.full((n, 1), 1.0, np.float32), "a": np.full((n, 1), 3.0, np.float32)} for n in (1, 2)]
    answers = handler.handle(rows, begin_batch(handler, 2, {"signature": ports}))
    assert [answer["difference"].tolist() for answer in answers] == [[[2.0]], [[2.0], [2.0]]]
    assert [answer["output-1"].shape for answer in answers] == [(1, 1), (2, 1)]


def test_a_module_rejects_text() -> None:
    handler = BaseHandler()
    handler.model = torch.nn.Linear(1, 1)
    [error] = handler.handle([{"t": np.array([b"x"], object)}], begin_batch(handler, 1))
    assert isinstance(error, PredictionException)
    assert "t is BYTES" in str(error)


def test_a_custom_stage_gets_the_rows() -> None:
    class CustomPreprocess(BaseHandler):
        def preprocess(self, data: Any) -> Any:
            return torch.from_numpy(np.concatenate([row["x"] for row in data]))

    handler = CustomPreprocess()
    handler.model = torch.nn.Identity()
    assert not handler.takes_tensors
    assert handler.handle([{"x": np.array([[1.0]])}], begin_batch(handler, 1)) == [[1.0]]


class _Subtract(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, a


def test_an_onnx_graph_has_a_signature_and_takes_arrays(tmp_path: Any) -> None:
    import onnx

    import handlers

    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])
    out = helper.make_tensor_value_info("twice", TensorProto.INT64, ["batch", "length"])
    graph = helper.make_graph([helper.make_node("Add", ["ids", "ids"], ["twice"])], "g", [ids], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    manifest = {"model": {"serializedFile": "model.onnx", "handler": "onnx"}}
    entry = handlers.load("onnx", tmp_path, manifest)
    context = Context("m", str(tmp_path), manifest)
    entry.initialize(context)
    assert entry.instance.signature == {
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}],
        "outputs": [{"name": "twice", "datatype": "INT64", "shape": [-1, -1]}],
    }
    context.begin(["a", "b", "c"], [{}] * 3, [{}] * 3)
    answers = entry([{"ids": np.ones(shape, np.int64)} for shape in ((1, 2), (3, 2), (1, 5))], context)
    assert [tuple(answer["twice"].shape) for answer in answers] == [(1, 2), (3, 2), (1, 5)]
    context.begin(["a"], [{}], [{}])
    assert entry([{"body": [1, 2]}], context) == [[2, 4]]


def test_the_recipe_runs() -> None:
    names: dict[str, Any] = {}
    exec((Path(__file__).parents[2] / "examples/02_custom_handler/recipes/norms.py").read_text(), names)
    handler = names["Norms"]()
    handler.initialize(None)
    answers = handler.handle([{"x": np.ones((n, 4))} for n in (1, 3)], None)
    assert [answer["norm"].tolist() for answer in answers] == [[4.0], [4.0] * 3]
