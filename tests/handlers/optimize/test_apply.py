"""The ``optimize:`` and ``accuracy:`` blocks of model-config.yaml, through BaseHandler as an archive would."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import handlers
from handlers.accuracy import Tolerance, difference
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.optimisation import buckets

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def loaded(archive: Any, begin: Callable[..., Context]) -> Callable[..., tuple[Any, list[Any]]]:
    """``loaded(config, model=..., rows=...)``: the handler with that model-config.yaml, and what it answers."""

    def load(
        config: dict[str, Any], model: str = MODEL, rows: list[Any] = ROWS, **more: str
    ) -> tuple[Any, list[Any]]:
        directory = archive(model=model, **more)
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load("handler.py" if more else "base_handler", directory, manifest)
        context = Context("net", str(directory), manifest, batch_size=4, model_yaml_config=config)
        entry.initialize(context)
        return entry.instance, entry([{"body": row} for row in rows], begin(context, len(rows)))

    return load


def size(model: torch.nn.Module) -> int:
    written = io.BytesIO()
    torch.save(model.state_dict(), written)
    return written.tell()


def near(plain: list[Any], within: float) -> list[Any]:
    return [pytest.approx(row, abs=within) for row in plain]


@pytest.mark.parametrize(
    ("optimize", "within"),
    [({"dtype": "bfloat16"}, 0.05), ({"dtype": "float16"}, 0.01), ({"quantize": "int8"}, 0.05)],
    ids=str,
)
def test_a_lossy_option_answers_nearly_the_same(loaded: Any, optimize: dict[str, str], within: float) -> None:
    plain, wanted = loaded({})
    handler, answers = loaded({"optimize": optimize})
    assert answers == near(wanted, within) and answers != wanted
    assert size(handler.model) < 0.8 * size(plain.model)
    whole = [[1, 0, 2, 0, 1, 0, 1, 3]]  # JSON writes 1.0 as 1
    assert loaded({"optimize": optimize}, rows=whole)[1] == near(loaded({}, rows=whole)[1], within)


def test_a_format_is_the_models_own_and_not_its_handlers(loaded: Any) -> None:
    handler = """
        import torch
        from handlers.base import BaseHandler

        class Handler(BaseHandler):
            def preprocess(self, data):
                return torch.tensor([row["body"] for row in data])

            def postprocess(self, output):
                return [str(row.numpy().dtype) for row in output]
    """
    assert loaded({"optimize": {"dtype": "bfloat16"}}, handler=handler)[1] == ["float32"] * len(ROWS)


def test_channels_last(loaded: Any) -> None:
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)).tolist()
    handler, answers = loaded({"optimize": {"channels_last": True}}, IMAGES, images)
    assert handler.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert answers == near(loaded({}, IMAGES, images)[1], 1e-5)


def test_a_compiled_model_is_ready_for_every_batch_bucket(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS[:2]))
    config = {"optimize": {"compile": {"dynamic": False}}, "accuracy": {"samples": "rows.json"}}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    handler, answers = loaded(config, LINEAR, ROWS[:4])
    assert answers == near(loaded({}, LINEAR, ROWS[:4])[1], 1e-4)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made - before >= 3  # 1, 2 and 4 rows
    for count in (1, 2, 4):
        handler.inference(torch.tensor(ROWS[:count]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made


def test_buckets() -> None:
    assert [buckets(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("kind", ["json", "pt", "safetensors"])
def test_a_model_outside_of_the_tolerance_does_not_start(loaded: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"samples.{kind}"
    if kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "pt":
        torch.save(torch.tensor(ROWS), file)
    else:
        save_file({"x": torch.tensor(ROWS)}, file)  # by the name of forward's argument
    config: dict[str, Any] = {"optimize": {"quantize": "int8"}}
    loaded(config | {"accuracy": {"samples": file.name, "rtol": 0.1, "atol": 0.1}})
    with pytest.raises(HandlerLoadError) as error:
        loaded(config | {"accuracy": {"samples": file.name, "rtol": 0, "atol": 1e-6}})
    said = str(error.value)
    assert "{quantize: int8}" in said and file.name in said and " instead of " in said
    assert "the largest difference is 0.0" in said and "Take that option out of optimize" in said


def test_a_cosine_is_asked_for_instead(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    config: dict[str, Any] = {"optimize": {"quantize": "int8"}}
    loaded(config | {"accuracy": {"samples": "rows.json", "cosine": 0.99}})
    with pytest.raises(HandlerLoadError, match="the cosine of a row is 0.99"):
        loaded(config | {"accuracy": {"samples": "rows.json", "cosine": 1}})


def test_the_log_warns_where_nobody_looks_at_the_answers(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded({"optimize": {"quantize": "int8"}})
    assert "quantize: int8} changes answers" in caplog.text


def test_what_does_not_apply_is_refused(loaded: Any) -> None:
    for optimize, model, wanted in (
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
        with pytest.raises(HandlerLoadError, match=wanted):
            loaded({"optimize": optimize}, model)
    with pytest.raises(HandlerLoadError, match="pt2 both compile"):
        loaded({"optimize": {"compile": True}, "pt2": "eager"})


def test_torchscript_is_a_graph_already(archive: Any) -> None:
    directory = archive()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(directory / "model.pt"))
    manifest = {"model": {"serializedFile": "model.pt"}}
    entry = handlers.load("base_handler", directory, manifest)
    config = {"optimize": {"dtype": "bfloat16"}}
    with pytest.raises(HandlerLoadError, match=r"RecursiveScriptModule. Archive the class .*--model-file"):
        entry.initialize(Context("net", str(directory), manifest, model_yaml_config=config))


def test_an_onnx_graph_in_int8(archive: Any, begin: Any) -> None:
    onnx = pytest.importorskip("onnx")
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

    wanted = (torch.tensor(ROWS) @ weight).tolist()
    answers = load({"quantize": "int8"}, 0.1)
    assert answers == near(wanted, 0.1) and answers != near(wanted, 1e-5)
    with pytest.raises(HandlerLoadError, match="outside of accuracy"):
        load({"quantize": "int8"}, 1e-6)
    with pytest.raises(HandlerLoadError, match="to an ONNX graph quantize: int8 alone applies"):
        load({"dtype": "bfloat16"}, 0.1)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("[[1, 2], [3]]", "the samples cannot be read"),
        ("[]", "it is no list of rows"),
        ("{", "the samples cannot be read"),
        (None, "not in the archive. Pack it with --extra-files"),
    ],
)
def test_samples_that_are_none(loaded: Any, tmp_path: Path, held: str | None, wanted: str) -> None:
    if held is not None:
        (tmp_path / "rows.json").write_text(held)
    with pytest.raises(HandlerLoadError, match=wanted):
        loaded({"optimize": {"quantize": "int8"}, "accuracy": {"samples": "rows.json"}})


def test_a_tolerance_that_is_none(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for accuracy, wanted in (
        ({"samples": "rows.json", "rtol": "1%"}, "accuracy.rtol is '1%'; write a number"),
        ({"samples": "rows.json", "cosin": 1}, "did you mean 'cosine'"),
        ({"rtol": 0.1}, "FILE is a file of the archive"),
    ):
        with pytest.raises(HandlerLoadError, match=wanted):
            loaded({"optimize": {"dtype": "bfloat16"}, "accuracy": accuracy})


def test_a_difference() -> None:
    plain = {"logits": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "index": torch.tensor([3, 4])}
    assert difference(plain, plain, Tolerance(0.0, 0.0, 1.0)).within
    apart = difference(plain, plain | {"logits": torch.tensor([[1.0, 0.0], [0.0, 2.5]])}, Tolerance(0.01, 0.01))
    assert apart.largest == 0.5 and "output 0[1, 1] is 2.5 instead of 2 (1 of 4 numbers are outside)" in apart.outside
    turned = difference(plain, plain | {"logits": torch.tensor([[0.0, 1.0], [0.0, 2.0]])}, Tolerance(cosine=0.9))
    assert turned.cosine == 0.0 and not turned.within
    broken = difference(plain, plain | {"logits": torch.full((2, 2), torch.nan)}, Tolerance(0.01, 0.01))
    assert broken.largest == float("inf") and not broken.within
    assert "shapes" in difference(plain, torch.ones(2), Tolerance(1.0, 1.0)).outside


def test_a_tolerance_as_yaml_reads_it() -> None:
    block = yaml.safe_load("{rtol: 1e-6, atol: 1.0e-6}")
    assert block["rtol"] == "1e-6", "YAML wants a point in a number"
    assert Tolerance.of(block) == Tolerance(1e-6, 1e-6)
    for wrong in ("much", "-1e-6", "nan"):
        with pytest.raises(HandlerLoadError, match=r"accuracy\.rtol is .*write a number from 0"):
            Tolerance.of({"rtol": wrong})
