"""ONNX graphs as BaseHandler and the handler `onnx` serve them; each is a few nodes, made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import handlers
from handlers import weights
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.onnx import OnnxModel

CPU = torch.device("cpu")
WEIGHT = np.array([[1, 0], [0, 2], [3, 0]], np.float32)  # [a, b, c] becomes [a + 3c, 2b]
Ports = list[tuple[str, int, list[Any] | None]]
ROW = ["batch", 3]


def graph(inputs: Ports, outputs: Ports, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    ports = [[helper.make_tensor_value_info(*port) for port in side] for side in (inputs, outputs)]
    weight = onnx.numpy_helper.from_array(WEIGHT, "w")
    model = helper.make_model(helper.make_graph(list(nodes), "g", *ports, [weight]), opset_imports=[opset(17)])
    model.ir_version = 9
    return model


def opset(version: int) -> onnx.OperatorSetIdProto:
    return helper.make_opsetid("", version)


def linear(batch: int | str = "batch", dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    put, out = [("x", dtype, [batch, 3])], [("y", TensorProto.FLOAT, [batch, 2])]
    cast = helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)
    return graph(put, out, cast, helper.make_node("MatMul", ["f", "w"], ["y"]))


def two() -> onnx.ModelProto:
    """ids and mask of any length: the masked ids, and each row's number of them."""
    return graph(
        [("ids", TensorProto.INT64, ["batch", "length"]), ("mask", TensorProto.INT64, ["batch", "length"])],
        [("masked", TensorProto.INT64, ["batch", "length"]), ("count", TensorProto.INT64, ["batch"])],
        helper.make_node("Mul", ["ids", "mask"], ["masked"]),
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("ReduceSum", ["mask", "axis"], ["count"], keepdims=0),
    )


@pytest.fixture
def model(tmp_path: Path) -> Callable[[onnx.ModelProto], OnnxModel]:
    def load(made: onnx.ModelProto) -> OnnxModel:
        onnx.save(made, tmp_path / "model.onnx")
        return weights.load(tmp_path / "model.onnx", CPU)

    return load


@pytest.fixture
def answers(tmp_path: Path, begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """``answers(graph, rows, handler="onnx")``: what that handler says to a batch of these rows."""

    def ask(made: onnx.ModelProto, rows: list[Any], handler: str = "onnx", **headers: str) -> list[Any]:
        onnx.save(made, tmp_path / "model.onnx")
        manifest = {"model": {"serializedFile": "model.onnx"}}
        entry = handlers.load(handler, tmp_path, manifest)
        context = Context("net", str(tmp_path), manifest)
        entry.initialize(context)
        return entry(rows, begin(context, len(rows), **headers))

    return ask


def bodies(*values: Any) -> list[dict[str, Any]]:
    return [{"body": value} for value in values]


# The graph as a model


def test_it_is_called_as_torchs_models_are(model: Any) -> None:
    net = model(linear())
    assert net.provider == "CPUExecutionProvider"
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    expected = torch.from_numpy(rows.numpy() @ WEIGHT)
    turned = rows.t().contiguous().t()
    for said in (rows, rows.double(), rows.numpy(), rows.tolist(), rows.int(), rows.bfloat16(), turned):
        assert torch.equal(net(said), expected)
    assert torch.equal(net(x=rows), expected) and torch.equal(net({"x": rows}), expected)
    assert torch.equal(net(rows.clone().requires_grad_()), expected)


def test_several_inputs_and_outputs(model: Any) -> None:
    net = model(two())
    ids, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 0]])
    for made in (net(ids, mask), net(mask=mask, ids=ids), net({"mask": mask, "ids": ids}), net(ids, mask=mask)):
        assert list(made) == ["masked", "count"]
        assert made["masked"].tolist() == [[5, 6, 0]] and made["count"].tolist() == [2]


def test_a_graph_of_one_row_runs_row_by_row(model: Any) -> None:
    net = model(linear(batch=1))
    rows = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(net(rows), torch.from_numpy(rows.numpy() @ WEIGHT))
    assert net(rows[:1]).shape == (1, 2)


def test_text_goes_in_and_comes_out(model: Any) -> None:
    port = [("x", TensorProto.STRING, ["n"])], [("y", TensorProto.STRING, ["n"])]
    net = model(graph(*port, helper.make_node("Identity", ["x"], ["y"])))
    assert net(["one", "two"]).tolist() == ["one", "two"]
    with pytest.raises(PredictionException, match=r"x holds int64"):
        net([1, 2])


@pytest.mark.parametrize(
    ("made", "said", "complaint"),
    [
        (linear(), torch.ones(2, 4), r"x has the shape \[2, 4\]. It takes x: float\[batch, 3\]"),
        (linear(), torch.ones(3), r"x has the shape \[3\]"),
        (linear(batch=1), torch.ones(4, 2), r"x has the shape \[4, 2\]. It takes x: float\[1, 3\]"),
        (linear(batch=4), torch.ones(2, 3), r"x has the shape \[2, 3\]. It takes x: float\[4, 3\]"),
        (linear(), [[1, 2, 3], [4, 5]], "parts differ in length"),
        (linear(), [["a", "b", "c"]], "x holds no numbers"),
        (linear(dtype=TensorProto.INT32), torch.ones(1, 3), r"x holds floats. It takes x: int32\[batch, 3\]"),
        (linear(dtype=TensorProto.INT32), torch.tensor([[1, 2, 2**40]]), "x holds numbers that int32 has no room for"),
        (linear(dtype=TensorProto.UINT8), torch.tensor([[1, 2, -1]]), "x holds numbers that uint8 has no room for"),
        (linear(), {"z": torch.ones(1, 3)}, "the input x is missing"),
        (linear(), {"x": torch.ones(1, 3), "z": 1}, "there is no input 'z'"),
        (two(), torch.ones(1, 3, dtype=torch.int64), "the input mask is missing"),
        (two(), {"ids": [[1, 2]], "mask": [[1, 1, 1]]}, r"axis length .*It takes ids: int64\[batch, length\], mask"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(model: Any, made: Any, said: Any, complaint: str) -> None:
    net = model(made)
    with pytest.raises(PredictionException, match=complaint) as raised:
        net(said)
    assert raised.value.error_code == 400


def test_as_many_threads_as_torch(model: Any) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert model(linear()).session.get_session_options().intra_op_num_threads == 2
    finally:
        torch.set_num_threads(before)


# What cannot be loaded


def test_a_gpu_that_is_not_there_is_said(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "model.onnx")
    with pytest.raises(HandlerLoadError, match=r"is to run on cuda:0, .*onnxruntime-gpu.*deviceType: cpu"):
        weights.load(tmp_path / "model.onnx", torch.device("cuda", 0))


def test_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    whole = linear().SerializeToString()
    for content in (b"this is no model", b"", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(HandlerLoadError, match=r"model\.onnx: .*The file is damaged or no ONNX graph"):
            weights.load(file, CPU)
    file.unlink()
    with pytest.raises(HandlerLoadError, match=r"model\.onnx: .*--serialized-file model\.onnx"):
        weights.load(file, CPU)


def test_weights_that_were_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(linear(), file, save_as_external_data=True, location="model.data", size_threshold=0)
    assert weights.load(file, CPU)([[1, 1, 1]]).tolist() == [[4, 2]]
    (tmp_path / "model.data").unlink()
    with pytest.raises(HandlerLoadError, match=r"pack that too \(--extra-files\).*model\.data"):
        weights.load(file, CPU)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda made: made.opset_import[0].__setattr__("version", 99), "lower opset_version"),
        (lambda made: made.__setattr__("ir_version", 99), "lower opset_version"),
        (lambda made: made.graph.node[0].__setattr__("op_type", "Foo"), "operator that this onnxruntime has not"),
        (lambda made: made.graph.input[0].type.tensor_type.__setattr__("elem_type", 16), r"x is a tensor\(bfloat16\)"),
    ],
)
def test_graphs_that_cannot_be_run(model: Any, change: Any, complaint: str) -> None:
    made = linear()
    change(made)
    with pytest.raises(HandlerLoadError, match=complaint):
        model(made)


def test_a_graph_is_no_weights_for_a_class(archive: Any) -> None:
    directory = archive(model="import torch\nclass Net(torch.nn.Module):\n    pass")
    with pytest.raises(HandlerLoadError, match=r"a \.onnx file is a whole model.*without --model-file"):
        weights.eager(directory / "model.py", directory / "model.onnx")


# In handlers


def test_the_base_handler_serves_it(answers: Any) -> None:
    assert answers(linear(), bodies([1, 2, 3], b"[0.5, 0, 0]"), "base_handler") == [[10, 4], [0.5, 0]]


def test_json_in_json_out(answers: Any) -> None:
    rows = [{"body": [1, 2, 3]}, {"data": b"[0, 0.5, 0]"}, {"body": {"x": [1, 0, 0]}}, {"x": b"[0, 0, 1]"}]
    assert answers(linear(), rows) == [[10, 4], [0, 1], [1, 0], [3, 0]]
    assert answers(linear(batch=1), rows) == [[10, 4], [0, 1], [1, 0], [3, 0]]


def test_rows_of_each_length_run_together(answers: Any) -> None:
    said = [{"ids": [5, 6, 7], "mask": [1, 0, 1]}, {"ids": [8], "mask": [1]}, {"ids": [1, 2, 3], "mask": [0, 0, 1]}]
    assert answers(two(), bodies(*said)) == [
        {"masked": [5, 0, 7], "count": 2},
        {"masked": [8], "count": 1},
        {"masked": [0, 0, 3], "count": 1},
    ]


def test_one_rows_error_is_that_rows_alone(answers: Any) -> None:
    said = ([1, 2, 3], [1, 2], "no JSON", {"z": [1, 2, 3]}, [1, "a", 3], None, [0, 1, 0])
    made = answers(linear(), bodies(*said))
    assert (made[0], made[-1]) == ([10, 4], [0, 2])
    wrong = made[1:-1]
    assert [error.error_code for error in wrong] == [400] * 5
    assert all("x: float[batch, 3]" in error.message for error in wrong), wrong
    assert "has the shape [2]" in wrong[0].message and "is not JSON" in wrong[1].message


def test_it_describes_its_graph(answers: Any) -> None:
    [said] = answers(two(), bodies(None), describe="True")
    assert said["inputs"][0] == {"name": "ids", "dtype": "int64", "shape": ["batch", "length"]}
    assert [port["name"] for port in said["outputs"]] == ["masked", "count"]


def test_what_the_handler_cannot_serve_is_said_at_once(archive: Any, answers: Any) -> None:
    for batch in (4, None):
        made = linear(batch=batch) if batch else graph(
            [("x", TensorProto.FLOAT, [])], [("y", TensorProto.FLOAT, [])], helper.make_node("Neg", ["x"], ["y"])
        )  # fmt: skip
        with pytest.raises(HandlerLoadError, match=r"the input x: float\[.*\] has no batch axis in front"):
            answers(made, bodies([1]))
    directory = archive(model="import torch\nclass Net(torch.nn.Module):\n    pass")
    manifest = {"model": {"modelFile": "model.py"}}
    with pytest.raises(HandlerLoadError, match=r"the handler onnx serves an \.onnx file"):
        handlers.load("onnx", directory, manifest).initialize(Context("net", str(directory), manifest))


def test_an_output_that_belongs_to_no_row_is_said(answers: Any) -> None:
    total = graph(
        [("x", TensorProto.FLOAT, ROW)],
        [("y", TensorProto.FLOAT, [])],
        helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0),
    )
    with pytest.raises(ValueError, match=r"the output y of 2 rows has the shape \[\]"):
        answers(total, bodies([1, 2, 3], [4, 5, 6]))


def test_a_signature_that_is_not_the_graphs_stops_the_start(tmp_path: Path, begin: Callable[..., Context]) -> None:
    onnx.save(linear(), tmp_path / "model.onnx")
    manifest = {"model": {"serializedFile": "model.onnx"}}

    def started(*ports: dict[str, Any]) -> Any:
        entry = handlers.load("onnx", tmp_path, manifest)
        config = {"signature": {"inputs": list(ports)}}
        entry.initialize(Context("net", str(tmp_path), manifest, model_yaml_config=config))
        return entry.instance.initialized

    x = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    for changes, why in (
        ({"name": "z"}, "the inputs z"),
        ({"shape": [-1, 4]}, r"x with the shape \[-1, 4\]"),
        ({"shape": [3]}, r"x with the shape \[3\]"),
    ):
        with pytest.raises(HandlerLoadError, match=rf"signature has {why}, and the graph takes x: float\[batch, 3\]"):
            started({**x, **changes})
    assert started(x) and started({**x, "shape": [-1, -1]}) and started({"name": "x", "datatype": "INT64"})
    onnx.save(linear(dtype=TensorProto.INT32), tmp_path / "model.onnx")
    with pytest.raises(HandlerLoadError, match=r"signature has x as FP32, and the graph takes x: int32\[batch, 3\]"):
        started(x)
    assert started()


def test_what_a_graph_answers_is_explained_by_number(answers: Any) -> None:
    pytest.importorskip("captum")
    rows = [{"body": [1, 2, 3], "target": target} for target in (0, 1)] + [{"body": [1, 2]}]
    first, second, wrong = answers(linear(), rows, explain="True")
    assert first == pytest.approx([1, 0, 9]) and second == pytest.approx([0, 4, 0])
    assert wrong.error_code == 400 and "has the shape [2]" in wrong.message
    [found] = answers(two(), [{"body": {"ids": [5, 6], "mask": [1, 0]}, "target": 0}], explain="True")
    assert found == {"ids": [5, 0], "mask": [5, 0]}, "of ids times mask"
    [beyond] = answers(linear(), [{"body": [1, 2, 3], "target": 7}, rows[0]], explain="True")[:1]
    assert beyond.error_code == 400
