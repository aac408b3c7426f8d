"""Tests of explanations of model folders."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from handlers import PredictionException
from handlers.context import Row
from handlers.explain import attributions
from tests.support.hf_folders import (
    MINILM,
    SHORT,
    ServedFolder,
    encode_png,
    explain_row,
    make_image,
    make_tokenizer,
    save_bert,
    save_segformer,
    save_vit,
    save_yolos,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]


@pytest.mark.parametrize(
    "method, steps, tolerance",
    [
        pytest.param("integrated_gradients", 500, 0.03, marks=pytest.mark.nightly),
        ("shapley", 3, 1e-5),
    ],
)
def test_a_texts_label_is_attributed_to_tokens(
    tmp_path: Path, method: str, steps: int, tolerance: float
) -> None:
    labels = {0: "cats", 1: "dogs"}
    config = {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
    options = {"method": method, "steps": steps}
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path, **config), explain=options)
    results = explain_row(served, data=SHORT.encode(), target=b"dogs")
    assert results["tokens"] == ["[CLS]", *SHORT.split(), "[SEP]"]
    encoded = make_tokenizer()([SHORT, SHORT], return_tensors="pt")
    encoded["input_ids"][1, 1:-1] = 0
    with torch.inference_mode():
        scores = served.entry.instance.model(**encoded).logits[:, 1].tolist()
    assert [results["score"], results["baseline_score"]] == pytest.approx(scores, abs=1e-5)
    tolerance_sum = tolerance * np.abs(results["attributions"]).sum()
    assert sum(results["attributions"]) == pytest.approx(scores[0] - scores[1], abs=tolerance_sum)
    assert explain_row(served, data=SHORT.encode(), target="1", steps="2")["score"] == results["score"]
    assert explain_row(served, data=SHORT.encode(), steps="2")["score"] != results["score"]
    assert explain_row(served, data=SHORT.encode(), target="birds").error_code == 400


def test_an_images_label_is_attributed_to_pixels(tmp_path: Path) -> None:
    served = ServedFolder(save_vit(tmp_path), task="image-classification")
    results = np.array(explain_row(served, data=encode_png(make_image(1)), method="feature_ablation"))
    assert results.ndim == 3 and len(results) == 3 and np.isfinite(results).all() and results.any()


def test_detections_and_segments_are_attributed_to_pixels(tmp_path: Path) -> None:
    for folder in (save_yolos(tmp_path / "boxes"), save_segformer(tmp_path / "segments")):
        served = ServedFolder(folder)
        handler = served.entry.instance
        picture = make_image(1, 32, 32)
        results = np.array(explain_row(served, data=encode_png(picture), target="LABEL_1", steps="200"))
        pixels = handler.task.processor(images=[picture], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            scores = handler.task.label_scores(handler.model(torch.cat([pixels, pixels * 0])))[:, 1].tolist()
        assert results.shape == pixels.shape[1:] and results.any()
        assert results.sum() == pytest.approx(scores[0] - scores[1], abs=0.02 * np.abs(results).sum())
        assert np.array(
            explain_row(served, data=encode_png(picture), target="1", method="feature_ablation")
        ).any()
        row = Row(
            {
                "body": {
                    "inputs": base64.b64encode(encode_png(picture)).decode(),
                    "target": "LABEL_1",
                    "steps": 200,
                }
            }
        )
        with pytest.raises(PredictionException):  # it is prepared like the row of a prediction
            handler.prepare_row(row)
        row.prepared = PredictionException("strange", 400)
        served.context.begin(["1"], [{"explain": "True"}], [{}])
        assert np.allclose(served.entry([row], served.context)[0], results, atol=1e-6)


def test_the_similarity_of_sentences_is_attributed_to_tokens() -> None:
    """Attribute an output that no head computes: the similarity of two sentences."""
    handler = ServedFolder(MINILM).entry.instance

    class Similarity:
        device, get_input_embeddings = torch.device("cpu"), handler.model.get_input_embeddings

        def __call__(self, **inputs: torch.Tensor) -> torch.Tensor:
            return (
                torch.nn.functional.normalize(handler.model(**inputs).last_hidden_state.mean(1)) @ self.other
            )

    similarity, words = Similarity(), handler.task.tokenizer
    with torch.inference_mode():
        similarity.other = torch.eye(384)
        [similarity.other] = similarity(**words("The cat catches a mouse.", return_tensors="pt"))
    similarity.other = similarity.other.clone()
    results = attributions.attribute_text(
        similarity, words, "A kitten hunts mice.", attributions.ExplanationOptions()
    )
    by_token = dict(zip(results["tokens"], results["attributions"]))
    assert sum(by_token.values()) == pytest.approx(results["score"] - results["baseline_score"], abs=0.01)
    assert set(sorted(by_token, key=by_token.get)[-3:]) >= {"kitten", "mice"}
