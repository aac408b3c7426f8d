"""Tests of ``optimize:`` and ``accuracy:`` of model-config.yaml, through BaseHandler."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.optimize.apply import warmup_batch_sizes
from handlers.optimize.tolerance_gate import Tolerance, compare_outputs

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(8, 256)
        layer = torch.nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1)
        self.last = torch.nn.Linear(64, 3)

    def forward(self, x):
        hidden = self.first(x).reshape(-1, 4, 64)
        return self.last(self.encoder(hidden).mean(1))
"""
IMAGES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).mean((2, 3))
"""
LINEAR = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(x).relu()
"""
ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).round(decimals=2).tolist()


@pytest.fixture
def load_handler(archive: Any, begin: Callable[..., Context]) -> Callable[..., tuple[Any, list[Any]]]:
    """Return a function that loads a handler with a model-config.yaml and returns it and its answers."""

    def load(
        config: dict[str, Any], model: str = MODEL, rows: list[Any] = ROWS, **files: str
    ) -> tuple[Any, list[Any]]:
        directory = archive(model=model, **files)
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load("handler.py" if files else "base_handler", directory, manifest)
        context = Context("net", str(directory), manifest, batch_size=4, model_yaml_config=config)
        entry.initialize(context)
        return entry.instance, entry([{"body": row} for row in rows], begin(context, len(rows)))

    return load


def saved_size(model: torch.nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def approximately(rows: list[Any], tolerance: float) -> list[Any]:
    return [pytest.approx(row, abs=tolerance) for row in rows]


@pytest.mark.parametrize(
    ("optimize", "tolerance"),
    [({"dtype": "bfloat16"}, 0.05), ({"dtype": "float16"}, 0.01), ({"quantize": "int8"}, 0.05)],
    ids=str,
)
def test_lossy_options_approximate_the_plain_model(
    load_handler: Any, optimize: dict[str, str], tolerance: float
) -> None:
    plain, expected = load_handler({})
    handler, answers = load_handler({"optimize": optimize})
    assert answers == approximately(expected, tolerance) and answers != expected
    assert saved_size(handler.model) < 0.8 * saved_size(plain.model)
    integers = [[1, 0, 2, 0, 1, 0, 1, 3]]  # JSON writes 1.0 as 1
    assert load_handler({"optimize": optimize}, rows=integers)[1] == approximately(
        load_handler({}, rows=integers)[1], tolerance
    )


def test_the_handler_sees_float32_whatever_the_dtype(load_handler: Any) -> None:
    handler = """
        import torch
        from handlers.base import BaseHandler

        class Handler(BaseHandler):
            def preprocess(self, data):
                return torch.tensor([row["body"] for row in data])

            def postprocess(self, output):
                return [str(row.numpy().dtype) for row in output]
    """
    assert load_handler({"optimize": {"dtype": "bfloat16"}}, handler=handler)[1] == ["float32"] * len(ROWS)


def test_channels_last_changes_the_memory_format(load_handler: Any) -> None:
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)).tolist()
    handler, answers = load_handler({"optimize": {"channels_last": True}}, IMAGES, images)
    assert handler.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert answers == approximately(load_handler({}, IMAGES, images)[1], 1e-5)


@pytest.mark.nightly
def test_a_compiled_model_is_warmed_up_for_every_batch_size(load_handler: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS[:2]))
    config = {"optimize": {"compile": {"dynamic": False}}, "accuracy": {"samples": "rows.json"}}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    handler, answers = load_handler(config, LINEAR, ROWS[:4])
    assert answers == approximately(load_handler({}, LINEAR, ROWS[:4])[1], 1e-4)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled - before >= 3  # 1, 2 and 4 rows
    for count in (1, 2, 4):
        handler.inference(torch.tensor(ROWS[:count]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_warmup_batch_sizes_are_powers_of_two_and_the_largest() -> None:
    assert [warmup_batch_sizes(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("kind", ["json", "pt", "safetensors"])
def test_a_model_outside_of_the_tolerance_is_not_loaded(load_handler: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"samples.{kind}"
    if kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "pt":
        torch.save(torch.tensor(ROWS), file)
    else:
        save_file({"x": torch.tensor(ROWS)}, file)  # by the name of forward's argument
    config: dict[str, Any] = {"optimize": {"quantize": "int8"}}
    load_handler(config | {"accuracy": {"samples": file.name, "rtol": 0.1, "atol": 0.1}})
    with pytest.raises(HandlerLoadError) as error:
        load_handler(config | {"accuracy": {"samples": file.name, "rtol": 0, "atol": 1e-6}})
    message = str(error.value)
    assert "{quantize: int8}" in message and file.name in message and " instead of " in message
    assert "the largest difference is 0.0" in message and "Take that option out of optimize" in message


def test_a_cosine_can_be_the_tolerance(load_handler: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    config: dict[str, Any] = {"optimize": {"quantize": "int8"}}
    load_handler(config | {"accuracy": {"samples": "rows.json", "cosine": 0.99}})
    with pytest.raises(HandlerLoadError, match=r"the cosine of a row is 0\.99"):
        load_handler(config | {"accuracy": {"samples": "rows.json", "cosine": 1}})


def test_a_lossy_option_without_accuracy_is_logged(
    load_handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_handler({"optimize": {"quantize": "int8"}})
    assert "quantize: int8} changes outputs" in caplog.text


def test_inapplicable_options_are_rejected(load_handler: Any) -> None:
    for optimize, model, message in (
        ({"channels_last": True}, MODEL, "no Conv2d. Take channels_last out"),
        ({"quantize": "int8"}, IMAGES, "Linear layers, and this model has none"),
        ({"quantize": "int8", "dtype": "bfloat16"}, MODEL, "Take one of the two out"),
        ({"quantize": "int8", "compile": True}, MODEL, "Take one of the two out"),
        ({"quantize": "int4"}, MODEL, "optimize.quantize is 'int4'; write int8"),
        ({"dtype": "bf16"}, MODEL, "write bfloat16 or float16"),
        ({"compile": {"mode": "fast"}}, MODEL, "max-autotune"),
        ({"compile": {"fullgraph": True}}, MODEL, "a mapping with mode and dynamic"),
        ({"channel_last": True}, MODEL, "did you mean 'channels_last'"),
        (True, MODEL, "optimize is True; write"),
    ):
        with pytest.raises(HandlerLoadError, match=message):
            load_handler({"optimize": optimize}, model)
    with pytest.raises(HandlerLoadError, match="pt2 both compile"):
        load_handler({"optimize": {"compile": True}, "pt2": "eager"})


def test_torchscript_cannot_be_optimized(archive: Any) -> None:
    directory = archive()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(directory / "model.pt"))
    manifest = {"model": {"serializedFile": "model.pt"}}
    entry = handlers.load("base_handler", directory, manifest)
    config = {"optimize": {"dtype": "bfloat16"}}
    with pytest.raises(HandlerLoadError, match=r"RecursiveScriptModule. Archive the class .*--model-file"):
        entry.initialize(Context("net", str(directory), manifest, model_yaml_config=config))


def test_an_onnx_graph_can_be_quantized(archive: Any, begin: Any) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(weight.numpy(), "w")],
    )
    directory = archive()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, directory / "model.onnx")
    (directory / "rows.json").write_text(json.dumps(ROWS))
    manifest = {"model": {"serializedFile": "model.onnx"}}

    def load(optimize: dict[str, Any], atol: float) -> list[Any]:
        entry = handlers.load("base_handler", directory, manifest)
        config = {"optimize": optimize, "accuracy": {"samples": "rows.json", "atol": atol}}
        context = Context("net", str(directory), manifest, model_yaml_config=config)
        entry.initialize(context)
        return entry([{"body": row} for row in ROWS], begin(context, len(ROWS)))

    expected = (torch.tensor(ROWS) @ weight).tolist()
    answers = load({"quantize": "int8"}, 0.1)
    assert answers == approximately(expected, 0.1) and answers != approximately(expected, 1e-5)
    with pytest.raises(HandlerLoadError, match="outside of accuracy"):
        load({"quantize": "int8"}, 1e-6)
    with pytest.raises(
        HandlerLoadError, match="to an ONNX graph fuse, dtype: float16 and quantize: int8 apply"
    ):
        load({"dtype": "bfloat16"}, 0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 2], [3]]", "the samples cannot be read"),
        ("[]", "it is no list of rows"),
        ("{", "the samples cannot be read"),
        (None, "not in the archive. Pack it with --extra-files"),
    ],
)
def test_invalid_samples_are_rejected(
    load_handler: Any, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "rows.json").write_text(content)
    with pytest.raises(HandlerLoadError, match=message):
        load_handler({"optimize": {"quantize": "int8"}, "accuracy": {"samples": "rows.json"}})


def test_invalid_tolerances_are_rejected(load_handler: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for accuracy, message in (
        ({"samples": "rows.json", "rtol": "1%"}, "accuracy.rtol is '1%'; write a number"),
        ({"samples": "rows.json", "cosin": 1}, "did you mean 'cosine'"),
        ({"rtol": 0.1}, "FILE is a file of the archive"),
    ):
        with pytest.raises(HandlerLoadError, match=message):
            load_handler({"optimize": {"dtype": "bfloat16"}, "accuracy": accuracy})


def test_compare_outputs() -> None:
    plain = {"logits": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "index": torch.tensor([3, 4])}
    assert compare_outputs(plain, plain, Tolerance(0.0, 0.0, 1.0)).is_within_tolerance
    changed = compare_outputs(
        plain, plain | {"logits": torch.tensor([[1.0, 0.0], [0.0, 2.5]])}, Tolerance(0.01, 0.01)
    )
    assert (
        changed.max_difference == 0.5
        and "output 0[1, 1] is 2.5 instead of 2 (1 of 4 numbers are outside)" in changed.violation
    )
    rotated = compare_outputs(
        plain, plain | {"logits": torch.tensor([[0.0, 1.0], [0.0, 2.0]])}, Tolerance(cosine=0.9)
    )
    assert rotated.min_cosine == 0.0 and not rotated.is_within_tolerance
    not_finite = compare_outputs(
        plain, plain | {"logits": torch.full((2, 2), torch.nan)}, Tolerance(0.01, 0.01)
    )
    assert not_finite.max_difference == float("inf") and not not_finite.is_within_tolerance
    assert "shapes" in compare_outputs(plain, torch.ones(2), Tolerance(1.0, 1.0)).violation


def test_a_tolerance_may_be_a_text_of_yaml() -> None:
    block = yaml.safe_load("{rtol: 1e-6, atol: 1.0e-6}")
    assert block["rtol"] == "1e-6", "YAML numbers have a decimal point"
    assert Tolerance.from_config(block) == Tolerance(1e-6, 1e-6)
    for invalid in ("much", "-1e-6", "nan"):
        with pytest.raises(HandlerLoadError, match=r"accuracy\.rtol is .*write a number from 0"):
            Tolerance.from_config({"rtol": invalid})
