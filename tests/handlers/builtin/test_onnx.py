"""Tests of ONNX graphs, served by BaseHandler and the handler `onnx`; each graph has a few nodes."""

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
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading import weights
from handlers.onnx_model import OnnxModel
from handlers.onnx_providers import select_providers
from tests.support.requirements import require_onnx_on_gpu

pytestmark = pytest.mark.integration


CPU = torch.device("cpu")
WEIGHT = np.array([[1, 0], [0, 2], [3, 0]], np.float32)  # [a, b, c] becomes [a + 3c, 2b]
Ports = list[tuple[str, int, list[Any] | None]]
ROW = ["batch", 3]


def make_graph(inputs: Ports, outputs: Ports, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    ports = [[helper.make_tensor_value_info(*port) for port in side] for side in (inputs, outputs)]
    weight = onnx.numpy_helper.from_array(WEIGHT, "w")
    model = helper.make_model(
        helper.make_graph(list(nodes), "g", *ports, [weight]), opset_imports=[opset(17)]
    )
    model.ir_version = 9
    return model


def opset(version: int) -> onnx.OperatorSetIdProto:
    return helper.make_opsetid("", version)


def make_linear(batch: int | str = "batch", dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    inputs, outputs = [("x", dtype, [batch, 3])], [("y", TensorProto.FLOAT, [batch, 2])]
    cast = helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)
    return make_graph(inputs, outputs, cast, helper.make_node("MatMul", ["f", "w"], ["y"]))


def make_masking() -> onnx.ModelProto:
    """Return a graph from ids and mask of any length to the masked ids and their number in each row."""
    return make_graph(
        [("ids", TensorProto.INT64, ["batch", "length"]), ("mask", TensorProto.INT64, ["batch", "length"])],
        [("masked", TensorProto.INT64, ["batch", "length"]), ("count", TensorProto.INT64, ["batch"])],
        helper.make_node("Mul", ["ids", "mask"], ["masked"]),
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("ReduceSum", ["mask", "axis"], ["count"], keepdims=0),
    )


@pytest.fixture
def model(tmp_path: Path) -> Callable[[onnx.ModelProto], OnnxModel]:
    def load(model_proto: onnx.ModelProto) -> OnnxModel:
        onnx.save(model_proto, tmp_path / "model.onnx")
        return weights.load(tmp_path / "model.onnx", CPU)

    return load


@pytest.fixture
def answers(tmp_path: Path, begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """Return ``predict(graph, rows, handler, **headers)``, which returns the handler's values for these
    rows.
    """

    def predict(
        model_proto: onnx.ModelProto, rows: list[Any], handler: str = "onnx", **headers: str
    ) -> list[Any]:
        onnx.save(model_proto, tmp_path / "model.onnx")
        manifest = {"model": {"serializedFile": "model.onnx"}}
        entry = handlers.load(handler, tmp_path, manifest)
        context = Context("net", str(tmp_path), manifest)
        entry.initialize(context)
        return entry(rows, begin(context, len(rows), **headers))

    return predict


def bodies(*values: Any) -> list[dict[str, Any]]:
    return [{"body": value} for value in values]


# The OnnxModel


def test_a_graph_is_called_like_a_module(model: Any) -> None:
    net = model(make_linear())
    assert net.provider == "CPUExecutionProvider"
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    expected = torch.from_numpy(rows.numpy() @ WEIGHT)
    transposed = rows.t().contiguous().t()
    for value in (rows, rows.double(), rows.numpy(), rows.tolist(), rows.int(), rows.bfloat16(), transposed):
        assert torch.equal(net(value), expected)
    assert torch.equal(net(x=rows), expected) and torch.equal(net({"x": rows}), expected)
    assert torch.equal(net(rows.clone().requires_grad_()), expected)


def test_several_inputs_and_outputs_have_names(model: Any) -> None:
    net = model(make_masking())
    ids, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 0]])
    for outputs in (
        net(ids, mask),
        net(mask=mask, ids=ids),
        net({"mask": mask, "ids": ids}),
        net(ids, mask=mask),
    ):
        assert list(outputs) == ["masked", "count"]
        assert outputs["masked"].tolist() == [[5, 6, 0]] and outputs["count"].tolist() == [2]


def test_a_graph_with_batch_size_1_runs_row_by_row(model: Any) -> None:
    net = model(make_linear(batch=1))
    rows = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(net(rows), torch.from_numpy(rows.numpy() @ WEIGHT))
    assert net(rows[:1]).shape == (1, 2)


def test_text_inputs_and_outputs(model: Any) -> None:
    port = [("x", TensorProto.STRING, ["n"])], [("y", TensorProto.STRING, ["n"])]
    net = model(make_graph(*port, helper.make_node("Identity", ["x"], ["y"])))
    assert net(["one", "two"]).tolist() == ["one", "two"]
    with pytest.raises(PredictionException, match=r"x holds int64"):
        net([1, 2])


@pytest.mark.parametrize(
    ("model_proto", "value", "message"),
    [
        (make_linear(), torch.ones(2, 4), r"x has the shape \[2, 4\]. It takes x: float\[batch, 3\]"),
        (make_linear(), torch.ones(3), r"x has the shape \[3\]"),
        (make_linear(batch=1), torch.ones(4, 2), r"x has the shape \[4, 2\]. It takes x: float\[1, 3\]"),
        (make_linear(batch=4), torch.ones(2, 3), r"x has the shape \[2, 3\]. It takes x: float\[4, 3\]"),
        (make_linear(), [[1, 2, 3], [4, 5]], "parts differ in length"),
        (make_linear(), [["a", "b", "c"]], "x holds no numbers"),
        (
            make_linear(dtype=TensorProto.INT32),
            torch.ones(1, 3),
            r"x holds floats. It takes x: int32\[batch, 3\]",
        ),
        (
            make_linear(dtype=TensorProto.INT32),
            torch.tensor([[1, 2, 2**40]]),
            "x holds numbers outside the range of int32",
        ),
        (
            make_linear(dtype=TensorProto.UINT8),
            torch.tensor([[1, 2, -1]]),
            "x holds numbers outside the range of uint8",
        ),
        (make_linear(), {"z": torch.ones(1, 3)}, "the input x is missing"),
        (make_linear(), {"x": torch.ones(1, 3), "z": 1}, "there is no input 'z'"),
        (make_masking(), torch.ones(1, 3, dtype=torch.int64), "the input mask is missing"),
        (
            make_masking(),
            {"ids": [[1, 2]], "mask": [[1, 1, 1]]},
            r"axis length .*It takes ids: int64\[batch, length\], mask",
        ),
    ],
)
def test_invalid_inputs_are_rejected_with_the_graphs_inputs(
    model: Any, model_proto: Any, value: Any, message: str
) -> None:
    net = model(model_proto)
    with pytest.raises(PredictionException, match=message) as raised:
        net(value)
    assert raised.value.error_code == 400


def test_sessions_have_as_many_threads_as_torch(model: Any) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert model(make_linear()).session.get_session_options().intra_op_num_threads == 2
    finally:
        torch.set_num_threads(before)


# Loading errors


def test_a_missing_gpu_is_an_error(tmp_path: Path) -> None:
    onnx.save(make_linear(), tmp_path / "model.onnx")
    with pytest.raises(HandlerLoadError, match=r"is to run on cuda:0, .*onnxruntime-gpu.*deviceType: cpu"):
        weights.load(tmp_path / "model.onnx", torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"providers": ["tensort"]}, "there is no provider 'tensort'; did you mean 'tensorrt'?"),
        ({"providers": ["tensorrt"]}, "has no tensorrt, it has cpu. Install onnxruntime-gpu"),
        ({"providers": ["openvino"]}, "has no openvino, it has cpu. Install onnxruntime-openvino"),
        ({"providers": "cpu"}, "write {providers: [NAME, …]}"),
        ({"provider": ["cpu"]}, "write {providers: [NAME, …]}"),
        ({"providers": []}, "write {providers: [NAME, …]}"),
        ({"providers": [{"cpu": 3}]}, "write a name, or {NAME: {OPTION: value}}"),
    ],
)
def test_a_provider_that_is_not_there_is_an_error(tmp_path: Path, block: Any, message: str) -> None:
    onnx.save(make_linear(), tmp_path / "model.onnx")
    with pytest.raises(HandlerLoadError) as refused:
        weights.load(tmp_path / "model.onnx", CPU, config={"onnx": block})
    assert str(refused.value).startswith("model-config.yaml: onnx")
    assert message in str(refused.value)


def test_providers_of_the_configuration_are_used(tmp_path: Path) -> None:
    onnx.save(make_linear(), tmp_path / "model.onnx")
    for name in ("cpu", "CPUExecutionProvider", {"cpu": {"use_arena": "0"}}):
        net = weights.load(tmp_path / "model.onnx", CPU, config={"onnx": {"providers": [name]}})
        assert net.provider == "CPUExecutionProvider"
        assert net.with_graph(tmp_path / "model.onnx").provider == "CPUExecutionProvider"


def test_a_provider_for_gpus_needs_one() -> None:
    available = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    config = {"onnx": {"providers": [{"tensorrt": {"trt_fp16_enable": True}}, "cuda"]}}
    with pytest.raises(HandlerLoadError, match="tensorrt needs a GPU, and this replica has none"):
        select_providers(config, "cpu", 0, available)
    assert select_providers(config, "cuda", 1, available) == [
        ("TensorrtExecutionProvider", {"device_id": 1, "trt_fp16_enable": True}),
        ("CUDAExecutionProvider", {"device_id": 1}),
    ]


@pytest.mark.gpu
def test_tensors_on_the_gpu_are_read_in_place(tmp_path: Path) -> None:
    require_onnx_on_gpu()
    onnx.save(make_linear(), tmp_path / "model.onnx")
    net = weights.load(tmp_path / "model.onnx", torch.device("cuda", 0))
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    bound = net(rows.cuda())
    assert bound.device.type == "cpu"
    assert torch.allclose(bound, net(rows))


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    content = make_linear().SerializeToString()
    for damaged in (b"this is no model", b"", content[: len(content) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(HandlerLoadError, match=r"model\.onnx: .*The file is damaged or no ONNX graph"):
            weights.load(file, CPU)
    file.unlink()
    with pytest.raises(HandlerLoadError, match=r"model\.onnx: .*--serialized-file model\.onnx"):
        weights.load(file, CPU)


def test_missing_external_weights_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(make_linear(), file, save_as_external_data=True, location="model.data", size_threshold=0)
    assert weights.load(file, CPU)([[1, 1, 1]]).tolist() == [[4, 2]]
    (tmp_path / "model.data").unlink()
    with pytest.raises(HandlerLoadError, match=r"pack that too \(--extra-files\).*model\.data"):
        weights.load(file, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model_proto: model_proto.opset_import[0].__setattr__("version", 99), "lower opset_version"),
        (lambda model_proto: model_proto.__setattr__("ir_version", 99), "lower opset_version"),
        (
            lambda model_proto: model_proto.graph.node[0].__setattr__("op_type", "Foo"),
            "operator that this onnxruntime has not",
        ),
        (
            lambda model_proto: model_proto.graph.input[0].type.tensor_type.__setattr__("elem_type", 16),
            r"x is a tensor\(bfloat16\)",
        ),
    ],
)
def test_unsupported_graphs_are_rejected(model: Any, change: Any, message: str) -> None:
    model_proto = make_linear()
    change(model_proto)
    with pytest.raises(HandlerLoadError, match=message):
        model(model_proto)


def test_a_graph_cannot_be_loaded_into_a_class(archive: Any) -> None:
    directory = archive(model="import torch\nclass Net(torch.nn.Module):\n    pass")
    with pytest.raises(HandlerLoadError, match=r"a \.onnx file is a whole model.*without --model-file"):
        weights.load_eager(directory / "model.py", directory / "model.onnx")


# Handlers


def test_the_base_handler_serves_a_graph(answers: Any) -> None:
    assert answers(make_linear(), bodies([1, 2, 3], b"[0.5, 0, 0]"), "base_handler") == [[10, 4], [0.5, 0]]


def test_rows_are_json(answers: Any) -> None:
    rows = [{"body": [1, 2, 3]}, {"data": b"[0, 0.5, 0]"}, {"body": {"x": [1, 0, 0]}}, {"x": b"[0, 0, 1]"}]
    assert answers(make_linear(), rows) == [[10, 4], [0, 1], [1, 0], [3, 0]]
    assert answers(make_linear(batch=1), rows) == [[10, 4], [0, 1], [1, 0], [3, 0]]


def test_rows_of_equal_length_run_together(answers: Any) -> None:
    rows = [
        {"ids": [5, 6, 7], "mask": [1, 0, 1]},
        {"ids": [8], "mask": [1]},
        {"ids": [1, 2, 3], "mask": [0, 0, 1]},
    ]
    assert answers(make_masking(), bodies(*rows)) == [
        {"masked": [5, 0, 7], "count": 2},
        {"masked": [8], "count": 1},
        {"masked": [0, 0, 3], "count": 1},
    ]


def test_invalid_rows_fail_alone(answers: Any) -> None:
    rows = ([1, 2, 3], [1, 2], "no JSON", {"z": [1, 2, 3]}, [1, "a", 3], None, [0, 1, 0])
    values = answers(make_linear(), bodies(*rows))
    assert (values[0], values[-1]) == ([10, 4], [0, 2])
    errors = values[1:-1]
    assert [error.error_code for error in errors] == [400] * 5
    assert all("x: float[batch, 3]" in error.message for error in errors), errors
    assert "has the shape [2]" in errors[0].message and "is not JSON" in errors[1].message


def test_describe_returns_the_graphs_inputs_and_outputs(answers: Any) -> None:
    [description] = answers(make_masking(), bodies(None), describe="True")
    assert description["inputs"][0] == {"name": "ids", "dtype": "int64", "shape": ["batch", "length"]}
    assert [port["name"] for port in description["outputs"]] == ["masked", "count"]


def test_unsupported_models_are_rejected_at_start(archive: Any, answers: Any) -> None:
    for batch in (4, None):
        ports = [("x", TensorProto.FLOAT, [])], [("y", TensorProto.FLOAT, [])]
        scalar = make_graph(*ports, helper.make_node("Neg", ["x"], ["y"]))
        model_proto = make_linear(batch=batch) if batch else scalar
        with pytest.raises(HandlerLoadError, match=r"the input x: float\[.*\] has no batch axis in front"):
            answers(model_proto, bodies([1]))
    directory = archive(model="import torch\nclass Net(torch.nn.Module):\n    pass")
    manifest = {"model": {"modelFile": "model.py"}}
    with pytest.raises(HandlerLoadError, match=r"the handler onnx serves an \.onnx file"):
        handlers.load("onnx", directory, manifest).initialize(Context("net", str(directory), manifest))


def test_outputs_without_a_batch_axis_are_an_error(answers: Any) -> None:
    total = make_graph(
        [("x", TensorProto.FLOAT, ROW)],
        [("y", TensorProto.FLOAT, [])],
        helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0),
    )
    with pytest.raises(ValueError, match=r"the output y of 2 rows has the shape \[\]"):
        answers(total, bodies([1, 2, 3], [4, 5, 6]))


def test_a_signature_must_match_the_graph(tmp_path: Path, begin: Callable[..., Context]) -> None:
    onnx.save(make_linear(), tmp_path / "model.onnx")
    manifest = {"model": {"serializedFile": "model.onnx"}}

    def is_initialized(*ports: dict[str, Any]) -> Any:
        entry = handlers.load("onnx", tmp_path, manifest)
        config = {"signature": {"inputs": list(ports)}}
        entry.initialize(Context("net", str(tmp_path), manifest, model_yaml_config=config))
        return entry.instance.initialized

    x = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    for changes, reason in (
        ({"name": "z"}, "the inputs z"),
        ({"shape": [-1, 4]}, r"x with the shape \[-1, 4\]"),
        ({"shape": [3]}, r"x with the shape \[3\]"),
    ):
        with pytest.raises(
            HandlerLoadError, match=rf"signature has {reason}, and the graph takes x: float\[batch, 3\]"
        ):
            is_initialized({**x, **changes})
    assert (
        is_initialized(x)
        and is_initialized({**x, "shape": [-1, -1]})
        and is_initialized({"name": "x", "datatype": "INT64"})
    )
    onnx.save(make_linear(dtype=TensorProto.INT32), tmp_path / "model.onnx")
    with pytest.raises(
        HandlerLoadError, match=r"signature has x as FP32, and the graph takes x: int32\[batch, 3\]"
    ):
        is_initialized(x)
    assert is_initialized()


def test_outputs_are_attributed_to_input_numbers(answers: Any) -> None:
    rows = [{"body": [1, 2, 3], "target": target} for target in (0, 1)] + [{"body": [1, 2]}]
    first, second, error = answers(make_linear(), rows, explain="True")
    assert first == pytest.approx([1, 0, 9]) and second == pytest.approx([0, 4, 0])
    assert error.error_code == 400 and "has the shape [2]" in error.message
    [attributions] = answers(
        make_masking(), [{"body": {"ids": [5, 6], "mask": [1, 0]}, "target": 0}], explain="True"
    )
    assert attributions == {"ids": [5, 0], "mask": [5, 0]}, "the attributions are ids times mask"
    [error] = answers(make_linear(), [{"body": [1, 2, 3], "target": 7}, rows[0]], explain="True")[:1]
    assert error.error_code == 400
