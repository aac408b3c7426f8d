"""ONNX graphs in float16 and with fused operators: the outputs of a small BERT stay close."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml
from onnx import TensorProto, helper
from transformers import BertConfig, BertForSequenceClassification

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.onnx_model import OnnxModel
from handlers.optimize import graph_export
from handlers.optimize.graph_optimization import optimize_graph

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CPU = torch.device("cpu")
CONFIG = BertConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG).eval()


@pytest.fixture(scope="module")
def graphs(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return the graph of each exporter: True for the one whose attention can be fused."""
    folder = tmp_path_factory.mktemp("graphs")
    files = {False: folder / "plain.onnx", True: folder / "fusable.onnx"}
    graph_export.export_onnx(bert, (), inputs(2, 16), files[False])
    graph_export.export_fusable_onnx(bert, (), inputs(2, 16), files[True])
    return files


def inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def operators(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


@pytest.mark.parametrize(
    ("fuse", "number_format", "tolerance"),
    [(False, "float16", 1e-3), (True, None, 1e-5), (True, "float16", 1e-3)],
)
def test_outputs_stay_close(
    bert: Any, graphs: Any, tmp_path: Path, fuse: bool, number_format: str | None, tolerance: float
) -> None:
    output = tmp_path / "made.onnx"
    optimize_graph(graphs[fuse], output, fuse=fuse, number_format=number_format, config=CONFIG)
    model = OnnxModel(output, CPU)
    for batch in (inputs(2, 16), inputs(3, 9)):
        with torch.no_grad():
            expected = bert(**batch).logits
        found = model(**batch)
        assert found.dtype == torch.float32
        assert torch.allclose(found, expected, atol=tolerance)
    found_operators = operators(output)
    assert (found_operators.count("Attention") == 2) is fuse
    assert (found_operators.count("SkipLayerNormalization") == 4) is fuse
    halves = [
        tensor for tensor in onnx.load(output).graph.initializer if tensor.data_type == TensorProto.FLOAT16
    ]
    assert bool(halves) is (number_format == "float16")


def test_the_model_keeps_its_attention(bert: Any, graphs: Any) -> None:
    assert bert.config._attn_implementation == "sdpa"


def test_a_graph_without_patterns_is_an_error(tmp_path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(HandlerLoadError, match="no attention, layer norm or activation to fuse"):
        optimize_graph(tmp_path / "model.onnx", tmp_path / "made.onnx", fuse=True)


def test_an_archive_with_a_graph_is_fused_as_it_loads(graphs: Any, tmp_path: Path) -> None:
    for file in graphs[False].parent.glob("plain.onnx*"):  # with its weights
        shutil.copy(file, tmp_path)
    manifest = {"model": {"serializedFile": "plain.onnx"}}

    def load(optimize: str) -> OnnxModel:
        config = yaml.safe_load(f"optimize: {optimize}")
        entry = handlers.load("base_handler", tmp_path, manifest)
        entry.initialize(Context("net", str(tmp_path), manifest, model_yaml_config=config))
        model: OnnxModel = entry.instance.model
        return model

    plain = load("{}")(**inputs(2, 16))
    assert torch.allclose(load("{fuse: true, dtype: float16}")(**inputs(2, 16)), plain, atol=1e-3)
    for optimize, message in (
        ("{fuse: yes please}", "write true or false"),
        ("{channels_last: true}", "to an ONNX graph fuse, dtype: float16 and quantize: int8 apply"),
    ):
        with pytest.raises(HandlerLoadError, match=message):
            load(optimize)
