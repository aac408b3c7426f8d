"""Tests of attributions; expected values follow Captum's definition, for models where it is exact."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import handlers
from handlers.base import BaseHandler
from handlers.builtin.image_classifier import ImageClassifier
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain.attributions import ExplanationOptions, attribute
from handlers.explain.occlusion import cell_indices
from handlers.loading.module_loader import load_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting forward, backward hooks and attributes:UserWarning"),
    pytest.mark.integration,
]

# Linear, so integrated gradients are weight times input exactly.
IMAGES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))

    def forward(self, x):
        return x.mean(dim=(2, 3)) @ self.weights.T
"""
TEXTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(4, 2, mode="sum")
        self.embedding.weight.data = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])

    def forward(self, text, offsets):
        return self.embedding(text, offsets) * torch.tensor([1.0, 3.0])
"""


@pytest.fixture
def explain(archive: Callable[..., Path], begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """Return ``explain(handler, model, rows)``, which explains rows with a built-in handler over a model."""

    def run(name: str, source: str, rows: list[Any], **config: Any) -> list[Any]:
        directory = archive(model=source)
        torch.save({"<unk>": 0, "the": 1, "cat": 2, "the cat": 3}, directory / "source_vocab.pt")
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load(name, directory, manifest)
        context = Context("m", str(directory), manifest, model_yaml_config=config)
        entry.initialize(context)
        with torch.inference_mode():  # explanations work in any mode of the caller
            return entry(rows, begin(context, len(rows), explain="True"))

    return run


def constant_image(value: float) -> list[Any]:
    return np.full((3, 4, 4), value).tolist()


def test_an_image_is_explained_by_pixel(explain: Any) -> None:
    first, second = explain(
        "image_classifier", IMAGES, [{"data": constant_image(1.0)}, {"data": constant_image(2.0)}]
    )
    assert np.allclose(first, np.array([1, 2, 3])[:, None, None] / 16 * np.ones((3, 4, 4)), atol=1e-5)
    assert np.allclose(second, 2 * np.array(first), atol=1e-5)
    buffer = io.BytesIO()
    Image.new("RGB", (256, 256), (255, 0, 0)).save(buffer, "PNG")
    [photograph] = explain("image_classifier", IMAGES, [{"data": buffer.getvalue()}])
    assert np.array(photograph).shape == (3, 224, 224)


def test_each_row_has_its_own_target(explain: Any) -> None:
    rows = [
        {"data": constant_image(1.0), "target": bytearray(b"1")},
        {"data": constant_image(1.0)},
        {"data": constant_image(1.0), "target": 9},
        {"data": constant_image(1.0), "target": 2**63},
    ]
    second, first, error, overflow = explain("image_classifier", IMAGES, [*rows])
    assert [plane[0][0] * 16 for plane in second] == pytest.approx([4, 5, 6], abs=1e-4)
    assert [plane[0][0] * 16 for plane in first] == pytest.approx([1, 2, 3], abs=1e-4)
    assert isinstance(error, PredictionException) and isinstance(overflow, PredictionException)
    assert error.error_code == overflow.error_code == 400 and "no output 9" in error.message


def test_a_text_is_explained_by_word(explain: Any) -> None:
    [first, second, third] = explain(
        "text_classifier",
        TEXTS,
        [{"data": "The cat", "target": "1"}, {"data": "the"}, {"data": "the", "target": 5}],
    )
    # The embedding of "the cat" is [2, 3]; output 1 is three times the second element.
    expected = torch.softmax(torch.tensor([[0.0, 9.0]]), 1)
    assert first == {
        "importances": [pytest.approx(expected[0].tolist(), abs=1e-5)],
        "words": ["the", "cat"],
        # "the" has 0, "cat" has 6, and each has half of the 3 of "the cat"
        "attributions": pytest.approx([1.5, 7.5], abs=1e-4),
        "score": 9.0,
        "baseline_score": 0.0,
    }
    assert second["words"] == ["the"]
    assert second["importances"] == [
        pytest.approx(torch.softmax(torch.tensor([1.0, 0.0]), 0).tolist(), abs=1e-5)
    ]
    assert third.error_code == 400


def test_a_text_model_without_a_known_embedding_is_perturbed(explain: Any) -> None:
    source = TEXTS.replace("self.embedding", "self.words")
    [found] = explain("text_classifier", source, [{"data": "the cat", "target": 1}])
    assert found["attributions"] == pytest.approx([1.5, 7.5], abs=1e-5)


def test_errors_of_the_model_are_raised(explain: Any) -> None:
    source = IMAGES.replace("        return", "        assert len(x) == 1, 'one at a time'\n        return")
    with pytest.raises(AssertionError, match="one at a time"):
        explain("image_classifier", source, [{"data": constant_image(1.0)}])


def test_missing_captum_is_reported(explain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(PredictionException, match=r"pip install 'torchrelay\[server\]'") as raised:
        explain("image_classifier", IMAGES, [{"data": constant_image(1.0)}])
    assert raised.value.error_code == 501


def test_a_handler_can_override_get_insights(archive: Any, begin: Any) -> None:
    class CustomHandler(BaseHandler):
        def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
            return [{"raw": raw_data, "target": target, "rows": len(tensor_data)}] * len(tensor_data)

    handler = CustomHandler()
    context = Context("m", str(archive(model=IMAGES)), {"model": {"modelFile": "model.py"}})
    handler.initialize(context)
    rows = [{"body": [1, 2], "target": "cat"}, {"body": [3, 4], "target": "dog"}]
    assert handler.handle(rows, begin(context, 2, explain="True")) == [
        {"raw": [1, 2], "target": "cat", "rows": 1},
        {"raw": [3, 4], "target": "dog", "rows": 1},
    ]
    assert handler.handle(rows[:1], begin(context, explain="True"))[0]["raw"] == [1, 2]


# Methods and options


def save_frozen(source: str, folder: Path) -> None:
    """Save the model of ``source``, scripted and frozen, as ``folder``/model.pt."""
    (folder / "model.py").write_text(source)
    model = load_module(folder / "model.py").Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.freeze(torch.jit.script(model.eval())), folder / "model.pt")


CONVOLUTION = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
        )

    def forward(self, x):
        with torch.no_grad():
            return self.layers(x)
"""


@pytest.mark.parametrize("method", ["shapley", "feature_ablation", "occlusion", "integrated_gradients"])
def test_every_method_finds_the_weights_of_a_linear_model(explain: Any, method: str) -> None:
    form = {"data": constant_image(2.0), "method": method.encode(), "internal_batch_size": "4", "target": 1}
    [found] = explain("image_classifier", IMAGES, [form])
    # The model weights the channels' means by four, five and six; tiles span all channels.
    weights = np.array([4, 5, 6]) if method == "integrated_gradients" else np.array([5, 5, 5])
    assert np.allclose(found, 2 * weights[:, None, None] / 16 * np.ones((3, 4, 4)), atol=1e-5)


def test_a_request_overrides_the_model_config(explain: Any) -> None:
    rows = [
        {"data": constant_image(1.0)},
        {"data": constant_image(1.0), "method": "integrated_gradients", "target": "0"},
    ]
    by_config, by_request = explain(
        "image_classifier", IMAGES, rows, explain={"method": "shapley", "steps": 2, "target": 1}
    )
    assert np.allclose(by_config, 5 / 16 * np.ones((3, 4, 4)))
    assert np.allclose(by_request, np.array([1, 2, 3])[:, None, None] / 16 * np.ones((3, 4, 4)), atol=1e-5)


@pytest.mark.parametrize(
    "options, cure",
    [
        ({"method": "gradcam"}, "method is 'gradcam'; there are integrated_gradients, occlusion"),
        ({"method": "shaply"}, "did you mean 'shapley'"),
        ({"steps": 0}, "steps is 0; write a whole number from 1 to 1000"),
        ({"steps": "many"}, "steps is 'many'; write a whole number"),
        ({"internal_batch_size": 2.5}, "internal_batch_size is 2.5; write a whole number from 1 to 4096"),
    ],
)
def test_invalid_options_are_rejected_with_the_cure(explain: Any, options: dict[str, Any], cure: str) -> None:
    with pytest.raises(HandlerLoadError, match=f"model-config.yaml: explain.*{cure}"):
        explain("image_classifier", IMAGES, [{"data": constant_image(1.0)}], explain=options)
    rejected, explained = explain(
        "image_classifier", IMAGES, [{"data": constant_image(1.0), **options}, {"data": constant_image(1.0)}]
    )
    assert rejected.error_code == 400 and re.search(cure, rejected.message)
    assert np.array(explained).shape == (3, 4, 4)


def test_invalid_explain_blocks_are_rejected(explain: Any) -> None:
    with pytest.raises(HandlerLoadError, match=r"explain has no key 'step'; did you mean 'steps'"):
        explain("image_classifier", IMAGES, [], explain={"step": 3})
    with pytest.raises(HandlerLoadError, match=r"explain is True; write explain: {method:"):
        explain("image_classifier", IMAGES, [], explain=True)


def test_a_frozen_model_without_gradients_is_perturbed(tmp_path: Path, begin: Any) -> None:
    save_frozen(CONVOLUTION, tmp_path)
    handler = ImageClassifier()
    handler.initialize(Context("m", str(tmp_path), {"model": {"serializedFile": "model.pt"}}))
    image = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1))
    row = {"data": image.tolist()}
    [ablated] = handler.handle([row], begin(handler.context, explain="True"))
    with torch.inference_mode():
        perturbed = image.clone()
        perturbed[:, 1, 2] = 0
        score, perturbed_score = handler.model(torch.stack((image, perturbed)))[:, 0].tolist()
        full_score, empty_score = handler.model(torch.stack((image, image * 0)))[:, 0].tolist()
    assert np.array(ablated)[:, 1, 2].sum() == pytest.approx(score - perturbed_score, abs=1e-5)
    [shapley] = handler.handle([{**row, "method": "shapley"}], begin(handler.context, explain="True"))
    assert np.sum(shapley) == pytest.approx(full_score - empty_score, abs=1e-4)
    with pytest.raises(
        PredictionException, match="no gradients, which integrated_gradients needs; ask for one of occ"
    ):
        handler.handle([{**row, "method": "integrated_gradients"}], begin(handler.context, explain="True"))


def test_an_onnx_session_is_perturbed(tmp_path: Path, begin: Any) -> None:
    import onnx

    weights = np.arange(96, dtype=np.float32).reshape(48, 2) / 96
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Flatten", ["images"], ["flat"]),
            onnx.helper.make_node("MatMul", ["flat", "weights"], ["scores"]),
        ],
        "linear",
        [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n", 3, 4, 4])],
        [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    opset = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "model.onnx")
    handler = ImageClassifier()
    handler.initialize(Context("m", str(tmp_path), {"model": {"serializedFile": "model.onnx"}}))
    [found] = handler.handle(
        [{"data": constant_image(2.0), "target": 1}], begin(handler.context, explain="True")
    )
    tiles = 2 * weights[:, 1].reshape(3, 4, 4).mean(axis=0)
    assert np.allclose(found, np.broadcast_to(tiles, (3, 4, 4)), atol=1e-5)


def test_any_callable_can_be_explained() -> None:

    def forward(rows: torch.Tensor) -> list[np.ndarray]:
        calls.append(len(rows))
        return [rows.numpy().sum(axis=1)]  # one output, no gradients, and in a list

    calls: list[int] = []
    inputs = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    options = ExplanationOptions(internal_batch_size=4)
    assert attribute(forward, inputs, options).tolist() == inputs.tolist()
    assert max(calls) == 4
    wide = torch.ones(1, 1000)  # more numbers than are perturbed one by one
    assert np.allclose(attribute(forward, wide, ExplanationOptions("shapley", steps=1)), 1)
    assert np.allclose(attribute(forward, wide, ExplanationOptions("occlusion")), 1, atol=0.01)


def test_equal_requests_get_equal_explanations() -> None:
    inputs = torch.rand(1, 6)
    found = [
        attribute(lambda rows: rows.prod(1).round(), inputs, ExplanationOptions("shapley", steps=2))
        for _ in range(2)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "shape, count",
    [((8,), 8), ((600,), 200), ((1, 8, 8), 64), ((3, 224, 224), 256), ((2, 30, 7), 105), ((), 1)],
)
def test_cell_indices(shape: tuple[int, ...], count: int) -> None:
    indices = cell_indices(shape)
    assert indices.shape == (1, *shape)
    assert indices.unique().tolist() == list(range(count))
