"""Checks of explanations of model folders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.hf_folders import ServedFolder, explain_row

ENTITIES = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))
NLI_LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
# Integrated gradients approximate the sum, better with more steps; Shapley values equal it.
METHODS = pytest.mark.parametrize(
    "options, tolerance",
    [({"steps": 500}, 0.03), ({"method": "shapley", "steps": 2}, 1e-5)],
    ids=["gradients", "shapley"],
)


def label_config(labels: dict[int, str]) -> dict[str, Any]:
    return {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}


def assert_sums(explanation: dict[str, Any], tolerance: float) -> None:
    """Check that the tokens' attributions sum to the score minus the baseline's."""
    assert len(explanation["tokens"]) == len(explanation["attributions"])
    size = sum(map(abs, explanation["attributions"]))
    assert size > 0 and abs(explanation["score"] - explanation["baseline_score"]) > 1e-4
    assert sum(explanation["attributions"]) == pytest.approx(
        explanation["score"] - explanation["baseline_score"], abs=tolerance * size
    )


def model_output(served: ServedFolder, *rows: list[int]) -> Any:
    """Return the model's output for rows of tokens."""
    ids = torch.tensor(rows)
    with torch.inference_mode():
        return served.entry.instance.model(ids, attention_mask=torch.ones_like(ids))


def approximate_scores(explanation: dict[str, Any]) -> Any:
    return pytest.approx([explanation["score"], explanation["baseline_score"]], abs=1e-4)


def pad_tokens(ids: list[int], mask: list[bool]) -> list[int]:
    """Return a row of tokens with the masked ones replaced by padding."""
    return [0 if masked else token for token, masked in zip(ids, mask)]


def rejection_message(served: ServedFolder, **fields: Any) -> str:
    error = explain_row(served, **fields)
    assert getattr(error, "error_code", error) == 400
    return error.message
