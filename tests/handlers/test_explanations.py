"""Why an answer is what it is; expected values are Captum's definition, worked out for models where it is exact."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import handlers
from handlers.base import BaseHandler
from handlers.context import Context
from handlers.errors import PredictionException

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks and attributes:UserWarning")

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
    """``explain(handler, model, rows)``: the explanations of the rows by the built-in handler over that model."""

    def run(name: str, source: str, rows: list[Any]) -> list[Any]:
        directory = archive(model=source)
        torch.save({"<unk>": 0, "the": 1, "cat": 2, "the cat": 3}, directory / "source_vocab.pt")
        manifest = {"model": {"modelFile": "model.py"}}
        entry = handlers.load(name, directory, manifest)
        context = Context("m", str(directory), manifest)
        entry.initialize(context)
        with torch.inference_mode():  # whatever the caller's mode
            return entry(rows, begin(context, len(rows), explain="True"))

    return run


def tensor(value: float) -> list[Any]:
    return np.full((3, 4, 4), value).tolist()


def test_an_image(explain: Any) -> None:
    pytest.importorskip("captum")
    first, second = explain("image_classifier", IMAGES, [{"data": tensor(1.0)}, {"data": tensor(2.0)}])
    assert np.allclose(first, np.array([1, 2, 3])[:, None, None] / 16 * np.ones((3, 4, 4)), atol=1e-5)
    assert np.allclose(second, 2 * np.array(first), atol=1e-5)
    buffer = io.BytesIO()
    Image.new("RGB", (256, 256), (255, 0, 0)).save(buffer, "PNG")
    [photograph] = explain("image_classifier", IMAGES, [{"data": buffer.getvalue()}])
    assert np.array(photograph).shape == (3, 224, 224)


def test_each_row_asks_about_an_output_of_its_own(explain: Any) -> None:
    pytest.importorskip("captum")
    rows = [{"data": tensor(1.0), "target": bytearray(b"1")}, {"data": tensor(1.0)}, {"data": tensor(1.0), "target": 9}]
    second, first, none = explain("image_classifier", IMAGES, [*rows])
    assert [plane[0][0] * 16 for plane in second] == pytest.approx([4, 5, 6], abs=1e-4)
    assert [plane[0][0] * 16 for plane in first] == pytest.approx([1, 2, 3], abs=1e-4)
    assert isinstance(none, PredictionException) and none.error_code == 400 and "no output 9" in none.message


def test_a_text(explain: Any) -> None:
    pytest.importorskip("captum")
    [first, second, third] = explain(
        "text_classifier", TEXTS, [{"data": "The cat", "target": "1"}, {"data": "the"}, {"data": "the", "target": 5}]
    )
    # The embedding of "the cat" is [2, 3], of which output 1 takes three times the second.
    expected = torch.softmax(torch.tensor([[0.0, 9.0]]), 1)
    assert first == {"importances": [pytest.approx(expected[0].tolist(), abs=1e-5)], "words": ["the", "cat"]}
    assert second["words"] == ["the"]
    assert second["importances"] == [pytest.approx(torch.softmax(torch.tensor([1.0, 0.0]), 0).tolist(), abs=1e-5)]
    assert third.error_code == 400


def test_a_text_model_without_an_embedding(explain: Any) -> None:
    source = TEXTS.replace("self.embedding", "self.words")
    [error] = explain("text_classifier", source, [{"data": "the"}])
    assert error.error_code == 501 and "no layer named embedding" in error.message


def test_what_the_model_itself_raises_is_raised(explain: Any) -> None:
    pytest.importorskip("captum")
    source = IMAGES.replace("        return", "        assert len(x) == 1, 'one at a time'\n        return")
    with pytest.raises(AssertionError, match="one at a time"):
        explain("image_classifier", source, [{"data": tensor(1.0)}])


def test_without_captum(explain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(PredictionException, match=r"install torchrelay\[explain\]") as raised:
        explain("image_classifier", IMAGES, [{"data": tensor(1.0)}])
    assert raised.value.error_code == 501


def test_a_handler_that_explains_in_its_own_way(archive: Any, begin: Any) -> None:
    class Own(BaseHandler):
        def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
            return [{"raw": raw_data, "target": target, "rows": len(tensor_data)}] * len(tensor_data)

    handler = Own()
    context = Context("m", str(archive(model=IMAGES)), {"model": {"modelFile": "model.py"}})
    handler.initialize(context)
    rows = [{"body": [1, 2], "target": "cat"}, {"body": [3, 4], "target": "dog"}]
    assert handler.handle(rows, begin(context, 2, explain="True")) == [
        {"raw": [1, 2], "target": "cat", "rows": 1},
        {"raw": [3, 4], "target": "dog", "rows": 1},
    ]
    assert handler.handle(rows[:1], begin(context, explain="True"))[0]["raw"] == [1, 2]
