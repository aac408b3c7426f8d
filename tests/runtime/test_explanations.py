"""Explanations through the runtime: attributions sum to the difference of the model's scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import HandlerRejected
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings

pytestmark = pytest.mark.integration


IMAGES = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
            torch.nn.Linear(72, 5)
        )
"""
RAW = """
import torch
from handlers.builtin.image_classifier import ImageClassifier

class Raw(ImageClassifier):
    def postprocess(self, data):
        assert torch.is_inference(data)
        return data.tolist()
"""
BAGS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.EmbeddingBag(5, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, text, offsets):
        return self.layers(self.embedding(text, offsets))
"""
# What transformers calls a classifier of texts and its tokenizer, without the library.
ENCODER = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(50, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = torch.nn.Linear(16, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(hidden[:, 0])}
"""
TOKENS = """
import torch
from handlers.explain import attributions
from handlers.base import BaseHandler

class Tokenizer:
    pad_token_id, unk_token_id = None, 0

    def __call__(self, text, pair, **how):
        ids = torch.tensor([[1, *(3 + sum(map(ord, word)) % 47 for word in text.split()), 2]])
        special = torch.zeros_like(ids)
        special[0, [0, -1]] = 1
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "special_tokens_mask": special,
        "more": ids}

    def convert_ids_to_tokens(self, ids):
        return [{1: "<s>", 2: "</s>"}.get(i, "word") for i in ids]

class Texts(BaseHandler):
    def preprocess(self, data):
        return [row["data"].decode() for row in data]

    def explain_handle(self, data_preprocess, raw_data):
        return self._insights_by_row(data_preprocess, raw_data)

    def get_insights(self, text, raw, target=0):
        return [attributions.attribute_text(self.model, Tokenizer(), text,
        self.explanation_options.for_row(self.explained_row, target))]
"""


@pytest.fixture
def ask(tmp_path: Path, own_process: None) -> Callable[..., Callable[..., Any]]:
    """``ask(handler, model)``: a function from a kind of call and form fields to the answer, or to the
    error.
    """

    def loaded(handler: str, model: str, **config: Any) -> Callable[..., Any]:
        (tmp_path / "model.py").write_text(model)
        torch.save({"<unk>": 0, "the": 1, "cat": 2, "the cat": 3, "sat": 4}, tmp_path / "source_vocab.pt")
        if "\n" in handler:
            (tmp_path / "handler.py").write_text(handler)
            handler = "handler.py"
        manifest = {
            "model": {"modelName": "m", "modelVersion": "1.0", "handler": handler, "modelFile": "model.py"}
        }
        spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="", handler=handler, config=config)
        runner = Runner(spec, tmp_path, manifest, RuntimeSettings())
        runner.load()

        def answer(kind: str, **fields: str) -> Any:
            lists = [
                InputPart(name, text.encode(), "application/json")
                for name, text in fields.items()
                if "[" in text
            ]
            plain = [InputPart(name, text.encode()) for name, text in fields.items() if "[" not in text]
            request = InferenceRequest("m", inputs=(*lists, *plain), kind=kind, request_id="id")
            [reply] = runner.run([request], lambda *_: None)
            return reply if isinstance(reply, Exception) else json.loads(reply.body)

        return answer

    return loaded


@pytest.mark.parametrize(
    "how, tolerance", [({}, 0.02), ({"steps": "200", "internal_batch_size": "16"}, 0.001)]
)
def test_an_image_s_attributions_sum_to_the_difference(
    ask: Any, how: dict[str, str], tolerance: float
) -> None:
    answer = ask(RAW, IMAGES)
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(1))
    scores, nothing = (
        answer("predict", data=str(image.tolist())),
        answer("predict", data=str((0 * image).tolist())),
    )
    for target in range(5):
        found = np.array(answer("explain", data=str(image.tolist()), target=str(target), **how))
        assert found.shape == (1, 8, 8)
        difference = scores[target] - nothing[target]
        assert found.sum() == pytest.approx(difference, abs=tolerance * np.abs(found).sum())
    assert answer("predict", data=str(image.tolist())) == scores, "predictions go on without gradients"


@pytest.mark.parametrize("method, tolerance", [("integrated_gradients", 0.01), ("shapley", 1e-5)])
@pytest.mark.parametrize(
    "handler, model", [("text_classifier", BAGS), (TOKENS, ENCODER)], ids=["bag", "encoder"]
)
def test_a_text_s_attributions_sum_to_the_difference(
    ask: Any, handler: str, model: str, method: str, tolerance: float
) -> None:
    answer = ask(handler, model, explain={"method": method})
    for target in range(3):
        found = answer("explain", data="the cat sat", target=str(target))
        difference = found["score"] - found["baseline_score"]
        assert abs(difference) > 0.01
        tolerated = tolerance * np.abs(found["attributions"]).sum()
        assert sum(found["attributions"]) == pytest.approx(difference, abs=tolerated)
        assert len(found["attributions"]) == len(found.get("words") or found["tokens"])


def test_what_a_tokenizer_adds_is_in_the_baseline_too(ask: Any) -> None:
    found = ask(TOKENS, ENCODER)("explain", data="the cat sat")
    assert found["tokens"] == ["<s>", "word", "word", "word", "</s>"]
    assert found["attributions"][0] == found["attributions"][-1] == 0
    assert all(found["attributions"][1:-1])


def test_a_question_that_cannot_be_answered_is_the_request_s_error(ask: Any) -> None:
    answer = ask(RAW, IMAGES)
    image = str(torch.zeros(1, 8, 8).tolist())
    for fields, why in (
        ({"target": "9"}, "no output 9"),
        ({"method": "guess"}, "there are integrated_gradients"),
    ):
        refused = answer("explain", data=image, **fields)
        assert isinstance(refused, HandlerRejected) and why in str(refused)
