"""Import paths that archives use."""

from __future__ import annotations

import importlib

import pytest

IMPORTED = {
    "handlers.vision": "VisionHandler",
    "handlers.onnx": "OnnxModel",
    "handlers.llm": "LanguageModel",
    "handlers.intermediate": "send_intermediate_predict_response",
    "handlers.image_classifier": "ImageClassifier",
    "handlers.base": "BaseHandler",
    "handlers.errors": "PredictionException",
}


@pytest.mark.parametrize("module", sorted(IMPORTED))
def test_import_paths_of_archives(module: str) -> None:
    assert hasattr(importlib.import_module(module), IMPORTED[module])
